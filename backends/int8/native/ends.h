// Epilogues, from sums to results: scaling, bias and residual, post-op, store.
//
// Quantized results have a fast path and an exact one. The fast path computes in fp32; where its rounding errors could change the
// level that a result rounds to, the exact path recomputes it. So the results are always those of the exact path.
#pragma once

#include "post.h"

namespace fusewright::int8 {
namespace {

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }
inline i64 blocks_of(i64 n, i64 size) { return (n + size - 1) / size; }

// The epilogue's per-column numbers of a panel, in fp64; see `Columns::of`.
struct Columns {
  alignas(64) double scale[kPanel];
  alignas(64) double bias[kPanel];
  alignas(64) std::int32_t offset[kPanel];

  // For columns [first, first + count): scale is the weight's, times that of x unless each row has its own; offset is the sum of
  // the weights, times the zero point of x under the same condition.
  void of(const float* w_scale, const float* bias_of, const std::int32_t* sums, i64 first, i64 count, double x_scale,
          std::int32_t zero) {
    for (i64 i = 0; i < count; ++i) {
      scale[i] = x_scale * static_cast<double>(w_scale[first + i]);
      offset[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(sums[first + i]) * static_cast<std::uint32_t>(zero));
    }
    for (i64 i = 0; i < count; ++i) bias[i] = bias_of ? static_cast<double>(bias_of[first + i]) : -0.0;  // x + -0.0 is x for every x
    for (i64 i = count; i < round_up(count, kNarrow); ++i) scale[i] = 0, bias[i] = -0.0, offset[i] = 0;
  }
};

// The zero point as the instructions see it: those that take only uint8 get int8 with 128 added.
template <bool FLIPS> std::int32_t zero_of(const Gemm& g, i64 row) { return g.x_zero[row] + (FLIPS && g.x_signed ? 128 : 0); }

template <bool FLIPS> void columns_of_panel(Columns& c, const Gemm& g, i64 first, i64 count) {
  double scale = g.per_row ? 1.0 : static_cast<double>(g.x_scale[0]);
  c.of(g.w_scale, g.bias, g.sums, first, count, scale, g.per_row ? 1 : zero_of<FLIPS>(g, 0));
}

// Whether a quantized result is a chain of monotonic steps: scale, an 8-bit residual, limits.
inline bool ends_quickly(const After& a) {
  bool residual = !a.residual || size_of(a.residual_type) == 1;
  return residual && size_of(a.out_type) == 1 && (a.post == Post::none || a.post == Post::relu || a.post == Post::clamp);
}

// The largest magnitude of the first `count` numbers; NaN if one of them is, because its bits compare above all others.
inline float largest(const float (&x)[kPanel], i64 count) {
  std::int32_t bits[kPanel], most = 0;
  __builtin_memcpy(bits, x, sizeof bits);
  for (i64 i = 0; i < count; ++i) most = (bits[i] & 0x7FFFFFFF) > most ? bits[i] & 0x7FFFFFFF : most;
  float found;
  __builtin_memcpy(&found, &most, sizeof found);
  return found;
}

// An upper bound of k products; both operands may have zero points.
inline float largest_sum(i64 k) { return 65025.0f * static_cast<float>(k) < 0x1p31f ? 65025.0f * static_cast<float>(k) : 0x1p31f; }

// A panel's columns in quantization levels (for int8 with 128 added): (sum - offset) * scale + bias + residual * residual_scale.
// It is computed with a lower and an upper bound of the bias: where both round to the same level, the exact path gives that
// level too.
struct Levels {
  static constexpr float kUnit = 0x1p-24f;  // the largest relative error of one rounding to fp32

  alignas(64) float scale[kPanel];
  alignas(64) float below[kPanel];
  alignas(64) float above[kPanel];
  float residual_scale = 0;
  std::uint8_t low = 0, high = 255;
  std::uint8_t flip = 0;  // XOR mask from levels to the result's bytes
  bool usable = false;    // else only the exact path is correct

  // `k`: the number of products in a sum.
  void of(const Columns& c, const After& a, i64 count, i64 k) {
    const i64 width = round_up(count, kNarrow);
    flip = a.out_type == Type::s8 ? 128 : 0;
    const double inverse = static_cast<double>(a.inverse), rest = inverse * static_cast<double>(a.residual_scale);
    const double shift = a.zero + flip - (a.residual ? rest * a.residual_zero : 0.0);
    alignas(64) float bias[kPanel] = {};
    for (i64 i = 0; i < width; ++i)
      scale[i] = static_cast<float>(c.scale[i] * inverse), bias[i] = static_cast<float>(c.bias[i] * inverse + shift);
    residual_scale = a.residual ? static_cast<float>(rest) : 0.0f;
    limits(a);
    const float steepest = largest(scale, width), most = largest(bias, width);
    const float added = 256.0f * __builtin_fabsf(residual_scale);
    // Bounds all rounding errors of either path, for levels up to 257 (larger ones clamp alike) and their summands.
    const float error = kUnit * (2560.0f + 5.0f * most + 6.0f * added);
    for (i64 i = 0; i < width; ++i) below[i] = bias[i] - error, above[i] = bias[i] + error;
    const bool fits = largest_sum(k) * steepest + most + added < 0x1p30f;  // fits int32; false for NaN and Inf
    usable = fits && error < 0.125f && a.inverse > 0x1p-100f && a.inverse < 0x1p100f && a.clamp_low <= a.clamp_high;
  }

 private:
  // Quantization is monotonic, so the post-op's limits become levels too.
  void limits(const After& a) {
    float least = static_cast<float>(a.low), most = static_cast<float>(a.high);
    if (a.post == Post::relu) least = within(static_cast<float>(a.zero), least, most);
    if (a.post == Post::clamp) {
      const float zero = static_cast<float>(a.zero), top = __builtin_rintf(a.clamp_high * a.inverse) + zero;
      least = within(__builtin_rintf(a.clamp_low * a.inverse) + zero, least, most), most = within(top, static_cast<float>(a.low), most);
    }
    low = static_cast<std::uint8_t>(static_cast<int>(least) + flip), high = static_cast<std::uint8_t>(static_cast<int>(most) + flip);
  }
  static float within(float x, float least, float most) { return x > most ? most : x > least ? x : least; }
};

// W sums from column j on, in fp32 with the bias. `row_scale` multiplies the columns' scale, `zero` their offset.
template <class V, bool PER_ROW>
inline typename V::F scaled_sums(const Columns& c, i64 j, const std::int32_t* sums, double row_scale, std::int32_t zero) {
  auto s = V::load(sums + j), offset = V::load(c.offset + j);
  if constexpr (PER_ROW)
    return V::scaled(V::sub(s, V::mul(offset, V::set(zero))), c.scale + j, c.bias + j, row_scale);
  else
    return V::scaled(V::sub(s, offset), c.scale + j, c.bias + j);
}

// The exact path: columns [from, from + count) of a row of sums that starts at column `first`.
template <class V, bool PER_ROW>
void finish_exactly(const After& a, const Columns& c, i64 row, i64 first, i64 from, i64 count, const std::int32_t* sums,
                    double row_scale = 1.0, std::int32_t zero = 1) {
  for (i64 j = from; j < from + count; j += V::W) {
    auto y = scaled_sums<V, PER_ROW>(c, j, sums, row_scale, zero);
    finish<V>(a, row, first + j, y, from + count - j);
  }
}

// Float results without residual or post-op: whole vectors of a row, without branches per vector.
template <class V, Type OUT, bool PER_ROW>
void finish_floats(const After& a, const Columns& c, i64 row, i64 first, i64 count, const std::int32_t* sums, double row_scale,
                   std::int32_t zero) {
  const i64 whole = count / V::W * V::W, at = row * a.out_stride + first;
  for (i64 j = 0; j < whole; j += V::W) {
    auto y = scaled_sums<V, PER_ROW>(c, j, sums, row_scale, zero);
    if constexpr (OUT == Type::f32)
      V::store(static_cast<float*>(a.out) + at + j, y);
    else
      store_bf16<V>(static_cast<std::uint16_t*>(a.out) + at + j, y);
  }
  if (whole < count) finish_exactly<V, PER_ROW>(a, c, row, first, whole, count - whole, sums, row_scale, zero);
}

// W sums as floats, without the offsets that they contain unless BEGINS (see `Ends`).
template <class V, bool BEGINS> typename V::F whole_sums(const std::int32_t* sums, typename V::I offset) {
  if constexpr (BEGINS) return V::to_float(V::load(sums));
  else return V::to_float(V::sub(V::load(sums), offset));
}

// The fast path for N W columns, N at most 4, of sums that still contain the offsets unless BEGINS (see `Ends`). Row-independent numbers are held in registers, because byte stores may alias anything
// and would force reloading them. RESIDUAL is f32 if there is none.
template <class V, Type RESIDUAL, bool BEGINS, int N> class QuickEnd {
 public:
  QuickEnd(const Columns& c, const Levels& l, i64 from) : residual_scale(V::set(l.residual_scale)), bytes(l.low, l.high, l.flip) {
    for (int v = 0; v < N; ++v) {
      offset[v] = V::load(c.offset + from + v * V::W), scale[v] = V::load(l.scale + from + v * V::W);
      below[v] = V::load(l.below + from + v * V::W), above[v] = V::load(l.above + from + v * V::W);
    }
  }

  // Store the first `count` results. Return false, without storing, if a level is uncertain.
  template <class... Count> bool store(const std::int32_t* sums, const std::uint8_t* residual, std::uint8_t* to, Count... count) const {
    typename V::I level[4], differing = V::set(0);
#pragma GCC unroll 4
    for (int v = N; v < 4; ++v) level[v] = V::set(0);
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      auto sum = whole_sums<V, BEGINS>(sums + v * V::W, offset[v]);
      auto low = below[v], high = above[v];
      if constexpr (RESIDUAL != Type::f32) {
        auto r = load_as<V>(residual, RESIDUAL, v * V::W);
        low = V::fma(r, residual_scale, low), high = V::fma(r, residual_scale, high);
      }
      level[v] = V::round(V::fma(sum, scale[v], low));
      differing = V::with_difference(differing, level[v], V::round(V::fma(sum, scale[v], high)));
    }
    if (V::any(differing)) return false;
    bytes.store(to, level, count...);
    return true;
  }

 private:
  typename V::I offset[N];
  typename V::F scale[N], below[N], above[N], residual_scale;
  typename V::Saturated bytes;
};

// `count` columns, at most 4 W, of which the first is column j of the panel that starts at column `first`.
template <class V, Type RESIDUAL, bool BEGINS, int N = 4>
void finish_columns(const After& a, const Columns& c, const Levels& l, i64 row, i64 rows, i64 first, i64 j, i64 count,
                    const std::int32_t* sums) {
  if constexpr (N > 1) {
    if (count <= (N - 1) * V::W) return finish_columns<V, RESIDUAL, BEGINS, N - 1>(a, c, l, row, rows, first, j, count, sums);
  }
  constexpr bool ADDS = RESIDUAL != Type::f32;
  const QuickEnd<V, RESIDUAL, BEGINS, N> end(c, l, j);
  auto to = static_cast<std::uint8_t*>(a.out) + row * a.out_stride + first + j;
  auto residual = ADDS ? static_cast<const std::uint8_t*>(a.residual) + row * a.residual_stride + first + j : nullptr;
  const auto left = static_cast<std::size_t>(count);
  const bool whole = count == N * V::W;
  for (i64 r = 0; r < rows; ++r, to += a.out_stride, residual += ADDS ? a.residual_stride : 0) {
    bool done;
    if (N == 4 && whole) {
      done = end.store(sums + r * kPanel + j, residual, to);
    } else if (whole) {
      done = end.store(sums + r * kPanel + j, residual, to, left);
    } else {  // nothing beside them may be touched
      alignas(64) std::uint8_t in[4 * V::W] = {};
      if (ADDS) __builtin_memcpy(in, residual, left);
      done = end.store(sums + r * kPanel + j, in, to, left);
    }
    if (!done) finish_exactly<V, false>(a, c, row + r, first, j, count, sums + r * kPanel);
  }
}

template <class V, Type RESIDUAL, bool BEGINS>
void finish_quickly(const After& a, const Columns& c, const Levels& l, i64 row, i64 rows, i64 first, i64 count,
                    const std::int32_t* sums) {
  constexpr i64 WIDE = 4 * V::W;
  for (i64 j = 0; j < count; j += WIDE) finish_columns<V, RESIDUAL, BEGINS>(a, c, l, row, rows, first, j, smaller(count - j, WIDE), sums);
}

template <class V, bool BEGINS>
void finish_quickly(const After& a, const Columns& c, const Levels& l, i64 row, i64 rows, i64 first, i64 count,
                    const std::int32_t* sums) {
  auto run = !a.residual                   ? finish_quickly<V, Type::f32, BEGINS>
             : a.residual_type == Type::u8 ? finish_quickly<V, Type::u8, BEGINS>
                                           : finish_quickly<V, Type::s8, BEGINS>;
  run(a, c, l, row, rows, first, count, sums);
}

}  // namespace
}  // namespace fusewright::int8
