// 512-bit vectors, with VNNI.
#pragma once

#include <immintrin.h>

#include "../types.h"

namespace fusewright::int8 {
namespace {

struct Vec {
  static constexpr int W = 16;
  static constexpr int NV = 4;
  static constexpr int HALVES = 1;
  // Accumulators fill the 32 registers: 6 x 4 = 24, plus four for weights and one for x.
  static constexpr int MR[] = {0, 12, 12, 8, 6};

  using F = __m512;
  using I = __m512i;
  using A = __m512i;
  using B = __m512i;

  static A broadcast(const std::uint8_t* p) {
    std::int32_t word;
    __builtin_memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
  }
  static A flip(A a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
  static B load_b(const std::int8_t* p) { return _mm512_loadu_si512(p); }
  // Not the intrinsic: GCC 12 copies every accumulator of a loop over it, which halves the speed.
  static I dot(I acc, A a, B b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
  static A load_a(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
  // Unpacking works in 128-bit lanes, so words are first moved to the lane that needs them.
  static void interleave(const std::uint8_t* const (&t)[4], std::uint8_t flip, bool whole, std::uint8_t* to) {
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const A mask = _mm512_set1_epi8(static_cast<char>(flip));
    auto load = [&](int i) { return _mm512_xor_si512(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(t[i])), mask); };
    const A a = load(0), b = load(1), c = load(2), d = load(3);
    A ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(ab, cd)), _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(ab, cd));
    if (!whole) return;
    ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
    _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(ab, cd)), _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(ab, cd));
  }

  static I load(const std::int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(std::int32_t* p, I a) { _mm512_storeu_si512(p, a); }
  static I set(std::int32_t x) { return _mm512_set1_epi32(x); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I shl(I a, int n) { return _mm512_slli_epi32(a, n); }
  static I sar(I a, int n) { return _mm512_srai_epi32(a, n); }
  static I shr(I a, int n) { return _mm512_srli_epi32(a, n); }
  static I with_difference(I found, I a, I b) { return _mm512_ternarylogic_epi32(found, a, b, 0xF6); }  // found | (a ^ b)
  static bool any(I a) { return _mm512_test_epi32_mask(a, a) != 0; }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  static I load_u8(const std::uint8_t* p) { return _mm512_cvtepu8_epi32(bytes(p)); }
  static I load_s8(const std::int8_t* p) { return _mm512_cvtepi8_epi32(bytes(p)); }
  static I load_u16(const std::uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_low8(std::uint8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  static void store_low16(std::uint16_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
  }

  // Store four vectors as bytes, or the first `count` of those, clamped to [low, high], then XORed with `flip`.
  struct Saturated {
    I low, high, flip, order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);

    Saturated(std::uint8_t low_, std::uint8_t high_, std::uint8_t flip_) : low(all(low_)), high(all(high_)), flip(all(flip_)) {}
    static I all(std::uint8_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
    void store(std::uint8_t* p, const I (&a)[4]) const { _mm512_storeu_si512(p, bytes_of(a)); }
    void store(std::uint8_t* p, const I (&a)[4], std::size_t count) const {
      _mm512_mask_storeu_epi8(p, (__mmask64{1} << count) - 1, bytes_of(a));
    }
    I bytes_of(const I (&a)[4]) const {
      I bytes = _mm512_packus_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
      bytes = _mm512_xor_si512(_mm512_min_epu8(_mm512_max_epu8(bytes, low), high), flip);
      return _mm512_permutexvar_epi32(order, bytes);
    }
  };

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F where_less(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }
  static I ordered(F a) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, a, _CMP_ORD_Q)); }
  static F rint(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I round(F a) { return _mm512_cvtps_epi32(a); }
  static F bits(I a) { return _mm512_castsi512_ps(a); }
  static I bits(F a) { return _mm512_castps_si512(a); }

  // 16 numbers, picked by the lowest four bits of each index.
  struct Table {
    F numbers;
    Table() = default;
    explicit Table(const float* p) : numbers(load(p)) {}
    F at(I i) const { return _mm512_permutexvar_ps(i, numbers); }
  };

  static F scaled(I a, const double* scale, const double* bias) {
    return scaled(a, _mm512_loadu_pd(scale), _mm512_loadu_pd(scale + 8), bias);
  }
  static F scaled(I a, const double* scale, const double* bias, double row) {
    __m512d r = _mm512_set1_pd(row);
    return scaled(a, _mm512_mul_pd(_mm512_loadu_pd(scale), r), _mm512_mul_pd(_mm512_loadu_pd(scale + 8), r), bias);
  }
  static F joined(const std::int32_t* s, i64 planes, const std::int32_t* offset, const double* scale, const double* bias,
                  double row) {
    __m256 lo = joined_half(s, planes, offset, scale, bias, row);
    __m256 hi = joined_half(s + 8, planes, offset + 8, scale + 8, bias + 8, row);
    return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1);
  }
  static I quantized64(F a, double inverse, double zero, double low, double high) {
    __m256i lo = quantized64(_mm512_cvtps_pd(_mm512_castps512_ps256(a)), inverse, zero, low, high);
    __m256i hi = quantized64(_mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)), inverse, zero, low, high);
    return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
  }

 private:
  static __m128i bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  // No fused multiply-add: the product is rounded, as torch's is.
  static F scaled(I a, __m512d lo, __m512d hi, const double* bias) {
    __m512d x = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(a)), lo);
    __m512d y = _mm512_mul_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(a, 1)), hi);
    x = _mm512_add_pd(x, _mm512_loadu_pd(bias)), y = _mm512_add_pd(y, _mm512_loadu_pd(bias + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x)), _mm512_cvtpd_ps(y), 1);
  }
  static __m256i half(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static __m256 joined_half(const std::int32_t* s, i64 planes, const std::int32_t* offset, const double* scale,
                            const double* bias, double row) {
    __m512d y = _mm512_cvtepi32_pd(_mm256_sub_epi32(half(s + (planes - 1) * kPanel), half(offset)));
    for (i64 p = planes - 2; p >= 0; --p)
      y = _mm512_add_pd(_mm512_mul_pd(y, _mm512_set1_pd(256.0)), _mm512_cvtepi32_pd(half(s + p * kPanel)));
    y = _mm512_mul_pd(y, _mm512_mul_pd(_mm512_loadu_pd(scale), _mm512_set1_pd(row)));
    return _mm512_cvtpd_ps(_mm512_add_pd(y, _mm512_loadu_pd(bias)));
  }
  static __m256i quantized64(__m512d x, double inverse, double zero, double low, double high) {
    x = _mm512_add_pd(_mm512_mul_pd(x, _mm512_set1_pd(inverse)), _mm512_set1_pd(zero));
    __mmask8 ordered = _mm512_cmp_pd_mask(x, x, _CMP_ORD_Q);
    x = _mm512_min_pd(_mm512_max_pd(x, _mm512_set1_pd(low)), _mm512_set1_pd(high));
    return _mm512_maskz_cvtpd_epi32(ordered, x);
  }
};

}  // namespace
}  // namespace fusewright::int8
