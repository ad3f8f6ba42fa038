// From sums to results: scaling, what is added, the post-op, and the store.
//
// Quantized results have a quick way and an exact one. The quick one computes in fp32; where the sum of all its roundings could
// change the level that a result rounds to, the exact one computes again. So both give what the exact one gives.
#pragma once

#include "post.h"

namespace fusewright::int8 {
namespace {

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// What the columns of a panel need after the sums, in fp64: see `Columns::of`.
struct Columns {
  alignas(64) double scale[kPanel];
  alignas(64) double bias[kPanel];
  alignas(64) std::int32_t offset[kPanel];

  // Of columns [first, first + count): scale is that of the weight, times that of x unless rows have their own; offset is the
  // sum of the weights, times the zero point of x likewise.
  void of(const float* w_scale, const float* bias_of, const std::int32_t* sums, i64 first, i64 count, double x_scale,
          std::int32_t zero) {
    for (i64 i = 0; i < kPanel; ++i) {
      bool there = i < count;
      scale[i] = there ? x_scale * static_cast<double>(w_scale[first + i]) : 0;
      bias[i] = there && bias_of ? static_cast<double>(bias_of[first + i]) : -0.0;  // x + -0.0 is x for every x
      offset[i] = there ? static_cast<std::int32_t>(static_cast<std::uint32_t>(sums[first + i]) * static_cast<std::uint32_t>(zero)) : 0;
    }
  }
};

// The zero point of what the instructions multiply: those that take only uint8 see int8 with 128 added.
template <bool FLIPS> std::int32_t zero_of(const Gemm& g, i64 row) { return g.x_zero[row] + (FLIPS && g.x_signed ? 128 : 0); }

template <bool FLIPS> void columns_of_panel(Columns& c, const Gemm& g, i64 first, i64 count) {
  double scale = g.per_row ? 1.0 : static_cast<double>(g.x_scale[0]);
  c.of(g.w_scale, g.bias, g.sums, first, count, scale, g.per_row ? 1 : zero_of<FLIPS>(g, 0));
}

// Whether a quantized result is a chain of monotonic steps: scale, a residual of 8 bits, limits.
inline bool ends_quickly(const After& a) {
  bool residual = !a.residual || size_of(a.residual_type) == 1;
  return residual && size_of(a.out_type) == 1 && (a.post == Post::none || a.post == Post::relu || a.post == Post::clamp);
}

// A panel's columns in levels of the result: level = sum * scale + bias + residual * residual_scale.
struct Levels {
  static constexpr float kUnit = 0x1p-24f;  // the largest relative error of one rounding to fp32

  alignas(64) float scale[kPanel];
  alignas(64) float bias[kPanel];
  float residual_scale = 0;
  float low = 0, high = 0;
  float certain = 0;  // a level this close to a whole number rounds to it on either way; negative: only the exact way is right

  template <class V> void of(const Columns& c, const After& a) {
    const double inverse = static_cast<double>(a.inverse), rest = inverse * static_cast<double>(a.residual_scale);
    const double shift = a.zero - (a.residual ? rest * a.residual_zero : 0.0);
    float most = 0, sum = 0;
    for (i64 i = 0; i < kPanel; ++i) {
      scale[i] = static_cast<float>(c.scale[i] * inverse), bias[i] = static_cast<float>(c.bias[i] * inverse + shift);
      float size = __builtin_fabsf(bias[i]);
      most = size > most ? size : most;
      sum += __builtin_fabsf(scale[i]) + size;  // NaN or Inf once one of them is
    }
    residual_scale = a.residual ? static_cast<float>(rest) : 0.0f;
    limits<V>(a);
    // Ten roundings of levels up to 257 (those beyond are clamped alike), and of what they are the difference of.
    float error = kUnit * (3072.0f + 8.0f * most + 4096.0f * residual_scale);
    bool usual = sum - sum == 0.0f && a.clamp_low <= a.clamp_high && error < 0.125f;
    usual = usual && a.inverse > 0x1p-100f && a.inverse < 0x1p100f;
    certain = usual ? 0.5f - error : -1.0f;
  }

 private:
  // Quantizing is monotonic: limits of the post-op are levels too.
  template <class V> void limits(const After& a) {
    low = static_cast<float>(a.low), high = static_cast<float>(a.high);
    if (a.post == Post::relu) return raise(static_cast<float>(a.zero));
    if (a.post != Post::clamp) return;
    const float top = __builtin_rintf(a.clamp_high * a.inverse) + static_cast<float>(a.zero);
    raise(__builtin_rintf(a.clamp_low * a.inverse) + static_cast<float>(a.zero));
    high = top < high ? top : high;
    high = high < static_cast<float>(a.low) ? static_cast<float>(a.low) : high;
  }
  void raise(float to) { low = to > low ? to : low; }
};

// W sums from column j on, in fp32 with the bias. `row_scale` times the columns' scale; `zero` times their offset.
template <class V, bool PER_ROW>
inline typename V::F scaled_sums(const Columns& c, i64 j, const std::int32_t* sums, double row_scale, std::int32_t zero) {
  auto s = V::load(sums + j), offset = V::load(c.offset + j);
  if constexpr (PER_ROW)
    return V::scaled(V::sub(s, V::mul(offset, V::set(zero))), c.scale + j, c.bias + j, row_scale);
  else
    return V::scaled(V::sub(s, offset), c.scale + j, c.bias + j);
}

// Sums to results the exact way: columns [from, from + count) of a row of sums that starts at `first`.
template <class V, bool PER_ROW>
void finish_exactly(const After& a, const Columns& c, i64 row, i64 first, i64 from, i64 count, const std::int32_t* sums,
                    double row_scale = 1.0, std::int32_t zero = 1) {
  for (i64 j = from; j < from + count; j += V::W) {
    auto y = scaled_sums<V, PER_ROW>(c, j, sums, row_scale, zero);
    finish<V>(a, row, first + j, y, from + count - j);
  }
}

// Floats with nothing added to them: whole vectors of a row, with no question asked at each.
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

// 4 W columns the quick way. What is the same for all rows is held in registers: a store of bytes may change any number, and each
// would be loaded again behind it.
// RESIDUAL is f32 where there is none.
template <class V, Type RESIDUAL> class QuickEnd {
 public:
  QuickEnd(const Columns& c, const Levels& l, i64 from)
      : low(V::set(l.low)), high(V::set(l.high)), residual_scale(V::set(l.residual_scale)), certain(V::set(l.certain)) {
    for (int v = 0; v < 4; ++v) {
      offset[v] = V::load(c.offset + from + v * V::W);
      scale[v] = V::load(l.scale + from + v * V::W), bias[v] = V::load(l.bias + from + v * V::W);
    }
  }

  // False, with nothing stored, where a level is uncertain.
  bool store(const std::int32_t* sums, const std::uint8_t* residual, std::uint8_t* to) const {
    typename V::F level[4], off[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      auto y = V::fma(V::to_float(V::sub(V::load(sums + v * V::W), offset[v])), scale[v], bias[v]);
      if constexpr (RESIDUAL == Type::u8) y = V::fma(V::to_float(V::load_u8(residual + v * V::W)), residual_scale, y);
      if constexpr (RESIDUAL == Type::s8)
        y = V::fma(V::to_float(V::load_s8(reinterpret_cast<const std::int8_t*>(residual) + v * V::W)), residual_scale, y);
      level[v] = V::rint(y), off[v] = absolute<V>(V::sub(y, level[v]));
    }
    // An infinite level is certain; its difference, NaN, is left out by taking the second operand.
    auto worst = V::max(off[0], V::set(0.0f));
#pragma GCC unroll 3
    for (int v = 1; v < 4; ++v) worst = V::max(off[v], worst);
    if (V::any_above(worst, certain)) return false;
    typename V::I whole[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) whole[v] = V::round(V::min(V::max(level[v], low), high));
    V::store_low8(to, whole);
    return true;
  }

 private:
  typename V::I offset[4];
  typename V::F scale[4], bias[4], low, high, residual_scale, certain;
};

template <class V, Type RESIDUAL>
void finish_quickly(const After& a, const Columns& c, const Levels& l, i64 row, i64 rows, i64 first, i64 count,
                    const std::int32_t* sums) {
  constexpr i64 WIDE = 4 * V::W;
  constexpr bool ADDS = RESIDUAL != Type::f32;
  for (i64 j = 0; j < count; j += WIDE) {
    const QuickEnd<V, RESIDUAL> end(c, l, j);
    auto to = static_cast<std::uint8_t*>(a.out) + row * a.out_stride + first + j;
    auto residual = ADDS ? static_cast<const std::uint8_t*>(a.residual) + row * a.residual_stride + first + j : nullptr;
    const auto left = static_cast<std::size_t>(smaller(count - j, WIDE));
    for (i64 r = 0; r < rows; ++r, to += a.out_stride, residual += ADDS ? a.residual_stride : 0) {
      bool done;
      if (left == WIDE) {
        done = end.store(sums + r * kPanel + j, residual, to);
      } else {  // through a copy: nothing beside them may be touched
        alignas(64) std::uint8_t in[WIDE] = {}, out[WIDE];
        if (ADDS) __builtin_memcpy(in, residual, left);
        done = end.store(sums + r * kPanel + j, in, out);
        if (done) __builtin_memcpy(to, out, left);
      }
      if (!done) finish_exactly<V, false>(a, c, row + r, first, j, static_cast<i64>(left), sums + r * kPanel);
    }
  }
}

template <class V>
void finish_quickly(const After& a, const Columns& c, const Levels& l, i64 row, i64 rows, i64 first, i64 count,
                    const std::int32_t* sums) {
  auto run = !a.residual                     ? finish_quickly<V, Type::f32>
             : a.residual_type == Type::u8 ? finish_quickly<V, Type::u8>
                                             : finish_quickly<V, Type::s8>;
  run(a, c, l, row, rows, first, count, sums);
}

// The ends of one panel: prepared once for its columns.
template <class V, bool FLIPS> class Ends {
 public:
  Ends(const Gemm& gemm, i64 first_, i64 count_) : g(gemm), first(first_), count(count_) {
    columns_of_panel<FLIPS>(columns, g, first, count);
    if (!g.per_row && ends_quickly(g.after)) levels.of<V>(columns, g.after);
  }
  // Rows [row, row + rows), whose sums are rows of kPanel.
  void finish(i64 row, i64 rows, std::int32_t* sums) const {
    if (g.row_terms) take_terms(row, rows, sums);
    if (levels.certain > 0) return finish_quickly<V>(g.after, columns, levels, row, rows, first, count, sums);
    const bool plain = !g.after.residual && g.after.post == Post::none && size_of(g.after.out_type) > 1;
    auto end = g.per_row ? row_end<true>(plain) : row_end<false>(plain);
    for (i64 r = row; r < row + rows; ++r, sums += kPanel)
      end(g.after, columns, r, first, count, sums, g.per_row ? static_cast<double>(g.x_scale[r]) : 1.0,
          g.per_row ? zero_of<FLIPS>(g, r) : 1);
  }

 private:
  template <bool PER_ROW> auto row_end(bool plain) const {
    if (!plain) return finish_row<PER_ROW>;
    return g.after.out_type == Type::f32 ? finish_floats<V, Type::f32, PER_ROW> : finish_floats<V, Type::bf16, PER_ROW>;
  }
  template <bool PER_ROW>
  static void finish_row(const After& a, const Columns& c, i64 row, i64 first, i64 count, const std::int32_t* sums,
                         double row_scale, std::int32_t zero) {
    finish_exactly<V, PER_ROW>(a, c, row, first, 0, count, sums, row_scale, zero);
  }
  void take_terms(i64 row, i64 rows, std::int32_t* sums) const {
    for (i64 r = row; r < row + rows; ++r, sums += kPanel)
      for (i64 j = 0; j < count; j += V::W) V::store(sums + j, V::sub(V::load(sums + j), V::set(g.row_terms[r])));
  }

  const Gemm& g;
  i64 first, count;
  Columns columns;
  Levels levels;
};

}  // namespace
}  // namespace fusewright::int8
