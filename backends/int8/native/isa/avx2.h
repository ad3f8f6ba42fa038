// 256-bit vectors; FUSEWRIGHT_AVX_VNNI is defined if VNNI is available for them.
#pragma once

#include <immintrin.h>

#include "../types.h"

namespace fusewright::int8 {
namespace {

struct Vec {
  static constexpr int W = 8;
  static constexpr int NV = 2;
  static constexpr int MR[] = {0, 6, 6};

  using F = __m256;
  using I = __m256i;

#ifdef FUSEWRIGHT_AVX_VNNI
  using A = __m256i;
  using B = __m256i;
  static A quads(__m256i a) { return a; }
  static A flip(A a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
  static B load_b(const std::int8_t* p) { return raw(p); }
  // Not the intrinsic: GCC 12 copies every accumulator of a loop over it.
  static I dot(I acc, A a, B b) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
    return acc;
  }
  static constexpr int HALVES = 1;
#else
  // vpmaddubsw saturates at 16 bits, so even and odd bytes are widened to 16 bits in place, and vpmaddwd sums two products
  // exactly.
  struct A { __m256i even, odd; };
  struct B { __m256i even, odd; };
  static A quads(__m256i a) { return {_mm256_and_si256(a, _mm256_set1_epi16(255)), _mm256_srli_epi16(a, 8)}; }
  static B load_b(const std::int8_t* p) {
    __m256i b = raw(p);
    return {_mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), _mm256_srai_epi16(b, 8)};
  }
  static I dot(I acc, A a, B b) {
    return half_dot(half_dot(acc, a.even, b.even), a.odd, b.odd);
  }
  // Products of rows take the even bytes of all quads, then the odd ones: with one half of the weights in registers there is room
  // for the sums of 6 rows. Rows are widened beforehand, so that a half of theirs is one load.
  static constexpr int HALVES = 2;
  static I half(const std::int8_t* p, int h) {
    __m256i b = raw(p);
    return _mm256_srai_epi16(h ? b : _mm256_slli_epi16(b, 8), 8);
  }
  // Not the intrinsics: GCC 12 adds the products of both halves before it adds them to the sums, which then do not fit the registers.
  static I half_dot(I acc, I a, I b) {
    I product;
    __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(a), "x"(b));
    return acc;
  }
  // Split integers into `bits` low bits and the signed rest, and store both as the halves of quads.
  static void store_halves(I a, int bits, std::uint8_t* low, std::uint8_t* high) {
    a = _mm256_shuffle_epi32(a, 0xD8);  // each lane is a quad: even numbers, then odd ones
    const I rest = _mm256_sra_epi32(a, _mm_cvtsi32_si128(bits));
    const I both = _mm256_packs_epi32(_mm256_and_si256(a, _mm256_set1_epi32((1 << bits) - 1)), rest);
    const I ordered = _mm256_permute4x64_epi64(both, 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm256_castsi256_si128(ordered));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm256_extracti128_si256(ordered, 1));
  }
  // Add W sums of low halves, and those of the rest a row of kPanel later, times `unit`.
  static void add_halves(double* to, const std::int32_t* sums, double unit) {
    for (int i = 0; i < W; i += 4) {
      const __m256d low = _mm256_cvtepi32_pd(four(sums + i)), high = _mm256_cvtepi32_pd(four(sums + kPanel + i));
      _mm256_storeu_pd(to + i, _mm256_add_pd(_mm256_loadu_pd(to + i), _mm256_fmadd_pd(high, _mm256_set1_pd(unit), low)));
    }
  }
  static F scaled(const double* y, const double* scale, const double* bias, double row) {
    __m128 half[2];
    for (int i = 0; i < 2; ++i) {
      const __m256d by = _mm256_mul_pd(_mm256_loadu_pd(scale + 4 * i), _mm256_set1_pd(row));
      half[i] = _mm256_cvtpd_ps(_mm256_add_pd(_mm256_mul_pd(_mm256_loadu_pd(y + 4 * i), by), _mm256_loadu_pd(bias + 4 * i)));
    }
    return _mm256_set_m128(half[1], half[0]);
  }
  // Write each quad of x, XORed with `flip`, as its even bytes and then its odd ones, in 16 bits; the last quad is padded with zeros.
  static void widen(const std::uint8_t* x, i64 k, std::uint8_t flip, std::uint8_t* to) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(flip));
    auto eight = [&](__m256i a, std::uint8_t* put) {
      const A wide = quads(_mm256_xor_si256(a, mask));
      const __m256i low = _mm256_unpacklo_epi32(wide.even, wide.odd), high = _mm256_unpackhi_epi32(wide.even, wide.odd);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(put), _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(put + 32), _mm256_permute2x128_si256(low, high, 0x31));
    };
    i64 at = 0;
    for (; at + 32 <= k; at += 32) eight(raw(x + at), to + 2 * at);
    if (at == k) return;
    alignas(32) std::uint8_t rest[32], wide[64];
    for (i64 i = 0; i < 32; ++i) rest[i] = at + i < k ? x[at + i] : flip;
    eight(raw(rest), wide);
    __builtin_memcpy(to + 2 * at, wide, static_cast<std::size_t>(2 * ((k - at + 3) / 4 * 4)));
  }
#endif
  static I broadcast(const std::uint8_t* p) {
    std::int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
  }
  static A load_a(const std::uint8_t* p) { return quads(raw(p)); }
  // Unpacking works in 128-bit lanes, so words are first moved to the lane that needs them.
  static void interleave(const std::uint8_t* const (&t)[4], std::uint8_t flip, bool whole, std::uint8_t* to) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), mask = _mm256_set1_epi8(static_cast<char>(flip));
    auto load = [&](int i) { return _mm256_xor_si256(_mm256_permutevar8x32_epi32(raw(t[i]), order), mask); };
    auto put = [&](int i, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * i), a); };
    const __m256i a = load(0), b = load(1), c = load(2), d = load(3);
    __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d);
    put(0, _mm256_unpacklo_epi16(ab, cd)), put(1, _mm256_unpackhi_epi16(ab, cd));
    if (!whole) return;
    ab = _mm256_unpackhi_epi8(a, b), cd = _mm256_unpackhi_epi8(c, d);
    put(2, _mm256_unpacklo_epi16(ab, cd)), put(3, _mm256_unpackhi_epi16(ab, cd));
  }

  static I load(const std::int32_t* p) { return raw(p); }
  static void store(std::int32_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static I set(std::int32_t x) { return _mm256_set1_epi32(x); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I shl(I a, int n) { return _mm256_slli_epi32(a, n); }
  static I sar(I a, int n) { return _mm256_srai_epi32(a, n); }
  static I shr(I a, int n) { return _mm256_srli_epi32(a, n); }
  static I with_difference(I found, I a, I b) { return _mm256_or_si256(found, _mm256_xor_si256(a, b)); }
  static bool any(I a) { return !_mm256_testz_si256(a, a); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  static I load_u8(const std::uint8_t* p) { return _mm256_cvtepu8_epi32(half(p)); }
  static I load_s8(const std::int8_t* p) { return _mm256_cvtepi8_epi32(half(p)); }
  static I load_u16(const std::uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_low8(std::uint8_t* p, I a) {
    const __m128i first = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m128i lo = _mm_shuffle_epi8(_mm256_castsi256_si128(a), first);
    __m128i hi = _mm_shuffle_epi8(_mm256_extracti128_si256(a, 1), first);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(lo, hi));
  }
  static void store_low16(std::uint16_t* p, I a) {
    a = _mm256_and_si256(a, _mm256_set1_epi32(0xFFFF));
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }

  // Store four vectors as bytes, or the first `count` of those, clamped to [low, high], then XORed with `flip`.
  struct Saturated {
    I low, high, flip, order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);

    Saturated(std::uint8_t low_, std::uint8_t high_, std::uint8_t flip_) : low(all(low_)), high(all(high_)), flip(all(flip_)) {}
    static I all(std::uint8_t x) { return _mm256_set1_epi8(static_cast<char>(x)); }
    void store(std::uint8_t* p, const I (&a)[4], std::size_t count) const {
      alignas(32) std::uint8_t copy[32];
      store(copy, a);
      __builtin_memcpy(p, copy, count);
    }
    void store(std::uint8_t* p, const I (&a)[4]) const {
      I bytes = _mm256_packus_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
      bytes = _mm256_xor_si256(_mm256_min_epu8(_mm256_max_epu8(bytes, low), high), flip);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(bytes, order));
    }
  };

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F where_less(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static I ordered(F a) { return _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_ORD_Q)); }
  static F rint(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I round(F a) { return _mm256_cvtps_epi32(a); }
  static F bits(I a) { return _mm256_castsi256_ps(a); }
  static I bits(F a) { return _mm256_castps_si256(a); }

  // 16 numbers, picked by the lowest four bits of each index.
  struct Table {
    F low, high;
    Table() = default;
    explicit Table(const float* numbers) : low(load(numbers)), high(load(numbers + W)) {}
    F at(I i) const {
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i), bits(shl(i, 28)));
    }
  };

  static F scaled(I a, const double* scale, const double* bias) {
    return scaled(a, _mm256_loadu_pd(scale), _mm256_loadu_pd(scale + 4), bias);
  }
  static F scaled(I a, const double* scale, const double* bias, double row) {
    __m256d r = _mm256_set1_pd(row);
    return scaled(a, _mm256_mul_pd(_mm256_loadu_pd(scale), r), _mm256_mul_pd(_mm256_loadu_pd(scale + 4), r), bias);
  }
#ifdef FUSEWRIGHT_AVX_VNNI
  static F joined(const std::int32_t* s, i64 planes, const std::int32_t* offset, const double* scale, const double* bias,
                  double row) {
    __m128 lo = joined_half(s, planes, offset, scale, bias, row);
    return _mm256_set_m128(joined_half(s + 4, planes, offset + 4, scale + 4, bias + 4, row), lo);
  }
#endif
  static I quantized64(F a, double inverse, double zero, double low, double high) {
    __m128i lo = quantized64(_mm256_cvtps_pd(_mm256_castps256_ps128(a)), inverse, zero, low, high);
    __m128i hi = quantized64(_mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)), inverse, zero, low, high);
    return _mm256_set_m128i(hi, lo);
  }

 private:
  static __m256i raw(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static __m128i half(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  // No fused multiply-add: the product is rounded, as torch's is.
  static F scaled(I a, __m256d lo, __m256d hi, const double* bias) {
    __m256d x = _mm256_mul_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(a)), lo);
    __m256d y = _mm256_mul_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(a, 1)), hi);
    x = _mm256_add_pd(x, _mm256_loadu_pd(bias)), y = _mm256_add_pd(y, _mm256_loadu_pd(bias + 4));
    return _mm256_set_m128(_mm256_cvtpd_ps(y), _mm256_cvtpd_ps(x));
  }
  static __m128i four(const std::int32_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
#ifdef FUSEWRIGHT_AVX_VNNI
  static __m128 joined_half(const std::int32_t* s, i64 planes, const std::int32_t* offset, const double* scale,
                            const double* bias, double row) {
    __m256d y = _mm256_cvtepi32_pd(_mm_sub_epi32(four(s + (planes - 1) * kPanel), four(offset)));
    for (i64 p = planes - 2; p >= 0; --p)
      y = _mm256_add_pd(_mm256_mul_pd(y, _mm256_set1_pd(256.0)), _mm256_cvtepi32_pd(four(s + p * kPanel)));
    y = _mm256_mul_pd(y, _mm256_mul_pd(_mm256_loadu_pd(scale), _mm256_set1_pd(row)));
    return _mm256_cvtpd_ps(_mm256_add_pd(y, _mm256_loadu_pd(bias)));
  }
#endif
  static __m128i quantized64(__m256d x, double inverse, double zero, double low, double high) {
    x = _mm256_add_pd(_mm256_mul_pd(x, _mm256_set1_pd(inverse)), _mm256_set1_pd(zero));
    __m256d ordered = _mm256_cmp_pd(x, x, _CMP_ORD_Q);
    x = _mm256_min_pd(_mm256_max_pd(x, _mm256_set1_pd(low)), _mm256_set1_pd(high));
    return _mm256_cvtpd_epi32(_mm256_and_pd(x, ordered));
  }
};

}  // namespace
}  // namespace fusewright::int8
