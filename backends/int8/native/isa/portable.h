// Vectors in plain C++: the fallback for any x86-64, and a reading guide to the other sets, which have the same functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../types.h"

namespace fusewright::int8 {
namespace {

struct Vec {
  static constexpr int W = 8;        // lanes of 32 bits
  static constexpr int NV = 2;       // vectors of columns per product
  static constexpr int HALVES = 1;   // parts of a quad that are multiplied one after the other
  static constexpr int MR[] = {0, 2, 2};  // most rows, indexed by the number of vectors

  struct F { float v[W]; };
  struct I { std::int32_t v[W]; };
  struct A { std::uint8_t v[4 * W]; };  // four uint8 per lane
  struct B { const std::int8_t* p; };   // four int8 per lane

  template <class T, class Fn> static T each(Fn f) {
    T r;
    for (int i = 0; i < W; ++i) r.v[i] = f(i);
    return r;
  }

  // -- 8-bit products
  static A broadcast(const std::uint8_t* p) {
    A a;
    for (int i = 0; i < W; ++i) std::memcpy(a.v + 4 * i, p, 4);
    return a;
  }
  static A flip(A a) {  // int8 to uint8: + 128
    for (int i = 0; i < 4 * W; ++i) a.v[i] ^= 0x80;
    return a;
  }
  static B load_b(const std::int8_t* p) { return {p}; }
  static I dot(I acc, const A& a, B b) {
    for (int i = 0; i < W; ++i)
      for (int j = 0; j < 4; ++j) acc.v[i] += std::int32_t{a.v[4 * i + j]} * b.p[4 * i + j];
    return acc;
  }
  static A load_a(const std::uint8_t* p) {
    A a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
  }
  // Interleave 4 W bytes from four places (the first half of them if not `whole`), XORed with `flip`.
  static void interleave(const std::uint8_t* const (&t)[4], std::uint8_t flip, bool whole, std::uint8_t* to) {
    for (int i = 0; i < (whole ? 4 : 2) * W; ++i)
      for (int s = 0; s < 4; ++s) to[4 * i + s] = t[s][i] ^ flip;
  }

  // -- integers
  static I load(const std::int32_t* p) { return each<I>([&](int i) { return p[i]; }); }
  static void store(std::int32_t* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
  static I set(std::int32_t x) { return each<I>([&](int) { return x; }); }
  static I add(I a, I b) { return each<I>([&](int i) { return wrap(u(a.v[i]) + u(b.v[i])); }); }
  static I sub(I a, I b) { return each<I>([&](int i) { return wrap(u(a.v[i]) - u(b.v[i])); }); }
  static I mul(I a, I b) { return each<I>([&](int i) { return wrap(u(a.v[i]) * u(b.v[i])); }); }
  static I shl(I a, int n) { return each<I>([&](int i) { return wrap(u(a.v[i]) << n); }); }
  static I sar(I a, int n) { return each<I>([&](int i) { return a.v[i] >> n; }); }
  static I shr(I a, int n) { return each<I>([&](int i) { return wrap(u(a.v[i]) >> n); }); }
  static I with_difference(I found, I a, I b) { return each<I>([&](int i) { return found.v[i] | (a.v[i] ^ b.v[i]); }); }
  static bool any(I a) {
    std::int32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= a.v[i];
    return bits != 0;
  }
  static I both(I a, I b) { return each<I>([&](int i) { return a.v[i] & b.v[i]; }); }
  static I load_u8(const std::uint8_t* p) { return each<I>([&](int i) { return std::int32_t{p[i]}; }); }
  static I load_s8(const std::int8_t* p) { return each<I>([&](int i) { return std::int32_t{p[i]}; }); }
  static I load_u16(const std::uint16_t* p) { return each<I>([&](int i) { return std::int32_t{p[i]}; }); }
  static void store_low8(std::uint8_t* p, I a) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<std::uint8_t>(a.v[i]);
  }
  static void store_low16(std::uint16_t* p, I a) {
    for (int i = 0; i < W; ++i) p[i] = static_cast<std::uint16_t>(a.v[i]);
  }

  // Store four vectors as bytes, or the first `count` of those, clamped to [low, high], then XORed with `flip`.
  struct Saturated {
    std::uint8_t low, high, flip;

    Saturated(std::uint8_t low_, std::uint8_t high_, std::uint8_t flip_) : low(low_), high(high_), flip(flip_) {}
    void store(std::uint8_t* p, const I (&a)[4], std::size_t count = 4 * W) const {
      for (std::size_t i = 0; i < count; ++i) {
        std::int32_t x = a[i / W].v[i % W];
        p[i] = static_cast<std::uint8_t>((x < low ? low : x > high ? high : x) ^ flip);
      }
    }
  };

  // -- fp32
  static F load(const float* p) { return each<F>([&](int i) { return p[i]; }); }
  static void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
  static F set(float x) { return each<F>([&](int) { return x; }); }
  static F add(F a, F b) { return each<F>([&](int i) { return a.v[i] + b.v[i]; }); }
  static F sub(F a, F b) { return each<F>([&](int i) { return a.v[i] - b.v[i]; }); }
  static F mul(F a, F b) { return each<F>([&](int i) { return a.v[i] * b.v[i]; }); }
  static F div(F a, F b) { return each<F>([&](int i) { return a.v[i] / b.v[i]; }); }
  static F fma(F a, F b, F c) { return each<F>([&](int i) { return ::fmaf(a.v[i], b.v[i], c.v[i]); }); }
  // Like the instructions: return b if either is NaN.
  static F max(F a, F b) { return each<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  static F min(F a, F b) { return each<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  static F where_less(F a, F b, F x, F y) { return each<F>([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; }); }
  static I ordered(F a) { return each<I>([&](int i) { return a.v[i] == a.v[i] ? -1 : 0; }); }
  static F rint(F a) { return each<F>([&](int i) { return ::rintf(a.v[i]); }); }
  static F to_float(I a) { return each<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
  static I round(F a) { return each<I>([&](int i) { return static_cast<std::int32_t>(::lrintf(a.v[i])); }); }
  static F bits(I a) {
    F f;
    std::memcpy(&f, &a, sizeof f);
    return f;
  }
  static I bits(F a) {
    I i;
    std::memcpy(&i, &a, sizeof i);
    return i;
  }

  // 16 numbers, picked by the lowest four bits of each index.
  struct Table {
    const float* of = nullptr;
    Table() = default;
    explicit Table(const float* numbers) : of(numbers) {}
    F at(I i) const { return each<F>([&](int j) { return of[i.v[j] & 15]; }); }
  };

  // -- through fp64
  static F scaled(I a, const double* scale, const double* bias) {
    return each<F>([&](int i) { return static_cast<float>(a.v[i] * scale[i] + bias[i]); });
  }
  static F scaled(I a, const double* scale, const double* bias, double row) {
    return each<F>([&](int i) { return static_cast<float>(a.v[i] * (scale[i] * row) + bias[i]); });
  }
  // Combine the sums of `planes` byte planes, lowest first, kPanel apart, into one number; `offset` belongs to the highest.
  static F joined(const std::int32_t* s, i64 planes, const std::int32_t* offset, const double* scale, const double* bias,
                  double row) {
    return each<F>([&](int i) {
      double y = s[(planes - 1) * kPanel + i] - offset[i];
      for (i64 p = planes - 2; p >= 0; --p) y = y * 256.0 + s[p * kPanel + i];
      return static_cast<float>(y * (scale[i] * row) + bias[i]);
    });
  }
  // round(a * inverse + zero) within [low, high], 0 for NaN
  static I quantized64(F a, double inverse, double zero, double low, double high) {
    return each<I>([&](int i) {
      double q = static_cast<double>(a.v[i]) * inverse + zero;
      if (q != q) return std::int32_t{0};
      return static_cast<std::int32_t>(::lrint(q < low ? low : q > high ? high : q));
    });
  }

 private:
  static std::uint32_t u(std::int32_t x) { return static_cast<std::uint32_t>(x); }
  static std::int32_t wrap(std::uint32_t x) { return static_cast<std::int32_t>(x); }
};

}  // namespace
}  // namespace fusewright::int8
