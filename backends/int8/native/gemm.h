// 8-bit products for one instruction set: blocks of rows by a panel of columns, over all of k, with sums in registers.
#pragma once

#include "panel.h"

namespace fusewright::int8 {
namespace {

constexpr i64 kAhead = 8192;  // prefetch distance in the weights, in bytes
constexpr i64 kHidden = 64;     // beside so many rows reading the weights takes no time
constexpr i64 kBlockRows = 24;  // sums of a block: 6 KiB, which stays in the L1 cache

// The weights from a column on, in its panel.
struct Weights {
  const std::int8_t* at;
  i64 step;  // bytes from one group of k to the next

  Weights(const Gemm& g, i64 column) {
    const i64 panel = column / kPanel;
    at = g.weight + panel * panel_bytes(g.k) + column_bytes(column % kPanel);
    step = kGroup * round_up(smaller(kPanel, g.n - panel * kPanel), kNarrow);
  }
};

// What the thread needs next: in each group of k a block brings some of its lines to the second-level cache.
struct Ahead {
  const std::int8_t* at = nullptr;
  i64 lines = 0;
};

// Sets that multiply whole quads have one part of a quad, those that multiply 16-bit numbers two.
template <class V> auto part_of(const std::int8_t* w, int part) {
  if constexpr (V::HALVES > 1) return V::half(w, part);
  else return V::load_b(w);
}
template <class V, class A, class B> typename V::I part_dot(typename V::I acc, const A& a, const B& b) {
  if constexpr (V::HALVES > 1) return V::half_dot(acc, a, b);
  else return V::dot(acc, a, b);
}

// MR rows of x by NV vectors of columns; sums go to `to`, in rows of kPanel. `step`: weight bytes from one group of k to the next.
template <class V, int MR, int NV, bool SIGNED>
void block(const std::uint8_t* x, i64 x_stride, const std::int8_t* w, i64 step, i64 k, Ahead& ahead, std::int32_t* to) {
  // Every loop over `acc` is unrolled; otherwise it would live in memory and be stored before and after the product.
  typename V::I acc[MR][NV];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = V::set(0);
  const std::uint8_t* row[MR];
  std::uint8_t rest[MR][4] = {};  // the last k % 4 of each row; reading past its end is not allowed
  const i64 whole = V::HALVES > 1 ? round_up(k, kQuad) : k / kQuad * kQuad;  // widened rows are padded
  for (int r = 0; r < MR; ++r) {
    row[r] = x + r * x_stride;
    for (i64 i = whole; i < k; ++i) rest[r][i - whole] = row[r][i];
  }

  const std::int8_t* line = ahead.at;
  for (i64 at = 0; at < whole;) {
    for (i64 i = 0; i < ahead.lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
    const std::int8_t* quad = w;
    for (const i64 end = smaller(at + kGroup, whole); at < end; at += kQuad, quad += kLine) {
      // Few rows are memory-bound, and the hardware's prefetch stops at page boundaries.
      if constexpr (MR <= kFewRows)
        for (int v = 0; v < NV * V::W / kNarrow; ++v) __builtin_prefetch(quad + kAhead + column_bytes(kNarrow * v));
#pragma GCC unroll 2
      for (int h = 0; h < V::HALVES; ++h) {
        decltype(part_of<V>(w, h)) b[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) b[v] = part_of<V>(quad + column_bytes(v * V::W), h);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) {
          auto a = V::broadcast(row[r] + V::HALVES * at + 4 * h);
          if constexpr (SIGNED && V::HALVES == 1) a = V::flip(a);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[r][v] = part_dot<V>(acc[r][v], a, b[v]);
        }
      }
    }
    if (at % kGroup == 0) w += step;
  }
  ahead.at = line;
  if (whole < k) {
    w += whole % kGroup / kQuad * kLine;
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      auto a = V::broadcast(rest[r]);
      if constexpr (SIGNED && V::HALVES == 1) a = V::flip(a);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = part_dot<V>(acc[r][v], a, part_of<V>(w + column_bytes(v * V::W), 0));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) V::store(to + r * kPanel + v * V::W, acc[r][v]);
}

template <class V, int MR, int NV, bool SIGNED>
void some_rows(i64 rows, const std::uint8_t* x, i64 x_stride, const std::int8_t* w, i64 step, i64 k, Ahead& ahead, std::int32_t* to) {
  if constexpr (MR > 1) {
    if (rows < MR) return some_rows<V, MR - 1, NV, SIGNED>(rows, x, x_stride, w, step, k, ahead, to);
  }
  block<V, MR, NV, SIGNED>(x, x_stride, w, step, k, ahead, to);
}

// `vectors` vectors of columns, at most V::NV at a time.
template <class V, int NV, bool SIGNED>
void some_columns(i64 vectors, i64 rows, const std::uint8_t* x, i64 x_stride, const std::int8_t* w, i64 step, i64 k,
                  Ahead& ahead, std::int32_t* to) {
  if constexpr (NV > 1) {
    if (vectors < NV) return some_columns<V, NV - 1, SIGNED>(vectors, rows, x, x_stride, w, step, k, ahead, to);
  }
  constexpr int most = V::MR[NV];
  // Blocks of nearly equal height: 8 rows are 4 + 4 rather than 6 + 2.
  for (i64 left = rows; left > 0;) {
    i64 height = (left + (left + most - 1) / most - 1) / ((left + most - 1) / most);
    some_rows<V, most, NV, SIGNED>(height, x, x_stride, w, step, k, ahead, to);
    left -= height, x += height * x_stride, to += height * kPanel;
  }
}

// Bytes from one row of k numbers of 16 bits to the next: successive rows lie in other lines of the L1 cache.
constexpr i64 wide_stride(i64 k) { return round_up(2 * round_up(k, kQuad), 64) + 64; }

// Sums of `rows` rows, as the blocks read them, by `width` columns of a panel, written in rows of kPanel.
template <class V>
void sums_of_rows(const std::uint8_t* x, i64 x_stride, bool is_signed, i64 rows, const std::int8_t* w, i64 step, i64 width, i64 k,
                  Ahead& ahead, std::int32_t* to) {
  for (i64 c = 0; c < width; c += V::NV * V::W) {
    i64 vectors = smaller(V::NV, (width - c) / V::W);
    if (is_signed)
      some_columns<V, V::NV, true>(vectors, rows, x, x_stride, w + column_bytes(c), step, k, ahead, to + c);
    else
      some_columns<V, V::NV, false>(vectors, rows, x, x_stride, w + column_bytes(c), step, k, ahead, to + c);
  }
}

// The same of rows of bytes, which some sets have to widen.
template <class V>
void sums_of_panel(const std::uint8_t* x, i64 x_stride, bool is_signed, i64 rows, const std::int8_t* w, i64 step, i64 width, i64 k,
                   Ahead& ahead, std::int32_t* to) {
  if constexpr (V::HALVES > 1) {
    const i64 stride = wide_stride(k);
    std::uint8_t* wide = scratch_of_rows(kBlockRows * stride);
    for (i64 r = 0; r < rows; ++r) V::widen(x + r * x_stride, k, is_signed ? 128 : 0, wide + r * stride);
    x = wide, x_stride = stride, is_signed = false;
  }
  sums_of_rows<V>(x, x_stride, is_signed, rows, w, step, width, k, ahead, to);
}

template <class V> void gemm(const Gemm& g, i64 row, i64 rows, i64 column, i64 columns, i64 next) {
  alignas(64) std::int32_t sums[kBlockRows * kPanel];
  constexpr i64 most = V::MR[V::NV];
  constexpr i64 step = kBlockRows / most * most;
  for (i64 c = column, end = column + columns, count; c < end; c += count) {
    const Weights w(g, c);
    count = smaller(kPanel - c % kPanel, end - c);
    const Ends<V, true, false> ends(g, c, count);
    const i64 width = round_up(count, kNarrow), passes = blocks_of(width, V::NV * V::W) * blocks_of(rows, most);
    Ahead ahead{Weights(g, c + count < end ? c + count : next).at};
    if (passes > 1 && rows < kHidden) ahead.lines = blocks_of(width * kGroup / kLine, passes);
    for (i64 r = row; r < row + rows; r += step) {
      i64 height = smaller(step, row + rows - r);
      sums_of_panel<V>(g.x + r * g.x_stride, g.x_stride, g.x_signed, height, w.at, w.step, width, g.k, ahead, sums);
      ends.finish(r, height, sums);
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
