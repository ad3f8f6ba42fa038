// The fast path of 8-bit results after gelu: gelu from a table, in fp32. Where all errors together could change the level that a
// result rounds to, the exact path recomputes it.
#pragma once

#include <cmath>

#include "ends.h"

namespace fusewright::int8 {
namespace {

// gelu(y) = y / 2 + |y| h(|y|), where h, half the error function or half the tanh of its approximation, is a cubic in each of 16
// intervals around multiples of STEP. Beyond LAST it is 1/2 as far as fp32 can tell.
class HalfTable {
 public:
  static constexpr float STEP = 0.34f, LAST = 15.49f * STEP;
  static constexpr float ERROR = 4e-6f;  // of |y| h(|y|) up to LAST, where it is 2.4e-6 at most

  alignas(64) float coefficient[4][16];

  explicit HalfTable(double (*h)(double)) {
    for (int i = 0; i < 16; ++i) interpolate(h, i);
  }

 private:
  // Newton's polynomial through the Chebyshev points of an interval, expanded around its middle.
  void interpolate(double (*h)(double), int interval) {
    const double middle = interval * double{STEP}, half = double{STEP} / 2;
    double at[4], of[4], sum[4] = {}, product[4] = {1};
    for (int j = 0; j < 4; ++j) at[j] = half * ::cos((2 * j + 1) * 3.14159265358979324 / 8), of[j] = h(middle + at[j]);
    for (int order = 1; order < 4; ++order)
      for (int j = 3; j >= order; --j) of[j] = (of[j] - of[j - 1]) / (at[j] - at[j - order]);
    for (int j = 0; j < 4; ++j) {
      for (int p = 0; p < 4; ++p) sum[p] += of[j] * product[p];
      for (int p = 3; p >= 0; --p) product[p] = (p ? product[p - 1] : 0.0) - at[j] * product[p];
    }
    for (int p = 0; p < 4; ++p) coefficient[p][interval] = static_cast<float>(sum[p]);
  }
};

inline double half_erf(double y) { return 0.5 * ::erf(y * 0.70710678118654752); }
inline double half_tanh(double y) { return 0.5 * ::tanh(0.79788456080286536 * (0.044715 * y * y * y + y)); }

inline const HalfTable& table_of(Post post) {
  static const HalfTable erf(half_erf), tanh(half_tanh);
  return post == Post::gelu ? erf : tanh;
}

// A panel's columns as y = (sum - offset) * scale + bias, and the bounds of gelu(y)'s level.
struct GeluLevels {
  alignas(64) float scale[kPanel];
  alignas(64) float bias[kPanel];
  float inverse = 1, below = 0, above = 0;
  std::uint8_t low = 0, high = 255, flip = 0;
  bool usable = false;  // else only the exact path is correct

  // `k`: the number of products in a sum.
  void of(const Columns& c, const After& a, i64 count, i64 k) {
    if ((a.post != Post::gelu && a.post != Post::gelu_tanh) || a.residual || size_of(a.out_type) != 1) return;
    const i64 width = round_up(count, kNarrow);
    for (i64 i = 0; i < width; ++i) scale[i] = static_cast<float>(c.scale[i]), bias[i] = static_cast<float>(c.bias[i]);
    flip = a.out_type == Type::s8 ? 128 : 0, inverse = a.inverse;
    low = static_cast<std::uint8_t>(a.low + flip), high = static_cast<std::uint8_t>(a.high + flip);
    // Levels up to 257 matter, as larger ones clamp alike, and no y is below -LAST.
    const float most = largest(bias, width), largest_y = 257.0f / inverse + HalfTable::LAST;
    const float error = inverse * (HalfTable::ERROR + Levels::kUnit * (16.0f * largest_y + 8.0f * most)) + Levels::kUnit * 2560.0f;
    const float middle = static_cast<float>(a.zero + flip);
    below = middle - error, above = middle + error;
    const bool fits = inverse * (largest_sum(k) * largest(scale, width) + most) < 0x1p30f;  // int32; false for NaN and Inf
    usable = fits && error < 0.125f && inverse > 0x1p-100f && inverse < 0x1p100f;
  }
};

// N W columns, N at most 4. BEGINS as in `Ends`.
template <class V, bool BEGINS, int N> class GeluEnd {
 public:
  GeluEnd(const Columns& c, const GeluLevels& l, const HalfTable& h, i64 from)
      : inverse(V::set(l.inverse)), below(V::set(l.below)), above(V::set(l.above)), bytes(l.low, l.high, l.flip) {
    for (int p = 0; p < 4; ++p) table[p] = typename V::Table(h.coefficient[p]);
    for (int v = 0; v < N; ++v) {
      offset[v] = V::load(c.offset + from + v * V::W);
      scale[v] = V::load(l.scale + from + v * V::W), bias[v] = V::load(l.bias + from + v * V::W);
    }
  }

  // Store the first `count` results. Return false, without storing, if a level is uncertain.
  template <class... Count> bool store(const std::int32_t* sums, std::uint8_t* to, Count... count) const {
    typename V::I level[4], differing = V::set(0);
#pragma GCC unroll 4
    for (int v = N; v < 4; ++v) level[v] = V::set(0);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      const auto g = gelu(V::fma(whole_sums<V, BEGINS>(sums + v * V::W, offset[v]), scale[v], bias[v]));
      level[v] = V::round(V::fma(g, inverse, below));
      differing = V::with_difference(differing, level[v], V::round(V::fma(g, inverse, above)));
    }
    if (V::any(differing)) return false;
    bytes.store(to, level, count...);
    return true;
  }

 private:
  typename V::F gelu(typename V::F y) const {
    y = V::max(y, V::set(-HalfTable::LAST));
    const auto size = absolute<V>(y), t = V::min(size, V::set(HalfTable::LAST));
    const auto number = V::fma(t, V::set(1 / HalfTable::STEP), V::set(0x1.8p23f));  // the interval, in the lowest bits
    const auto r = V::fma(V::sub(number, V::set(0x1.8p23f)), V::set(-HalfTable::STEP), t);
    const auto interval = V::bits(number);
    auto h = table[3].at(interval);
#pragma GCC unroll 3
    for (int p = 2; p >= 0; --p) h = V::fma(h, r, table[p].at(interval));
    return V::fma(size, h, V::mul(y, V::set(0.5f)));
  }

  typename V::I offset[N];
  typename V::F scale[N], bias[N], inverse, below, above;
  typename V::Table table[4];
  typename V::Saturated bytes;
};

// `count` columns, at most 4 W, of which the first is column j of the panel that starts at column `first`.
template <class V, bool BEGINS, int N = 4>
void gelu_columns(const After& a, const Columns& c, const GeluLevels& l, i64 row, i64 rows, i64 first, i64 j, i64 count,
                  const std::int32_t* sums) {
  if constexpr (N > 1) {
    if (count <= (N - 1) * V::W) return gelu_columns<V, BEGINS, N - 1>(a, c, l, row, rows, first, j, count, sums);
  }
  const GeluEnd<V, BEGINS, N> end(c, l, table_of(a.post), j);
  auto to = static_cast<std::uint8_t*>(a.out) + row * a.out_stride + first + j;
  const auto left = static_cast<std::size_t>(count);
  for (i64 r = 0; r < rows; ++r, to += a.out_stride, sums += kPanel) {
    const bool done = N == 4 && count == N * V::W ? end.store(sums + j, to) : end.store(sums + j, to, left);
    if (!done) finish_exactly<V, false>(a, c, row + r, first, j, count, sums);
  }
}

template <class V, bool BEGINS>
void finish_gelu(const After& a, const Columns& c, const GeluLevels& l, i64 row, i64 rows, i64 first, i64 count,
                 const std::int32_t* sums) {
  constexpr i64 WIDE = 4 * V::W;
  for (i64 j = 0; j < count; j += WIDE) gelu_columns<V, BEGINS>(a, c, l, row, rows, first, j, smaller(count - j, WIDE), sums);
}

}  // namespace
}  // namespace fusewright::int8
