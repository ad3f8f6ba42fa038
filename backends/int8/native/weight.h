// Float rows times int8 weights, through 8-bit products: see `WeightGemm`. Few rows should run at the speed of reading the weight;
// widening it in registers would be slower, because it takes four times as many instructions.
#pragma once

#include "gemm.h"

namespace fusewright::int8 {
namespace {

inline double number(const WeightGemm& g, i64 row, i64 k) {
  i64 at = row * g.floats_stride + k;
  if (g.type == Type::f32) return double{static_cast<const float*>(g.floats)[at]};
  std::uint32_t bits = std::uint32_t{static_cast<const std::uint16_t*>(g.floats)[at]} << 16;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return double{x};
}

// A row that is not finite, multiplied as floats: slow, but with the right NaNs and infinities.
template <class V>
void unusual_row(const WeightGemm& g, const Columns& c, i64 row, i64 first, i64 count, const std::int8_t* w, i64 width) {
  alignas(64) float y[kPanel] = {};
  for (i64 j = 0; j < count; ++j) {
    double sum = 0;
    for (i64 k = 0; k < g.k; ++k) sum += number(g, row, k) * w[column_bytes(j) + depth_bytes(k, width)];
    y[j] = static_cast<float>(sum * c.scale[j] + c.bias[j]);
  }
  for (i64 j = 0; j < count; j += V::W) finish<V>(g.after, row, first + j, V::load(y + j), count - j);
}

// `multiply(x, rows, weights, width, sums)` computes sums of uint8 rows, as `sums_of_panel` or tiles do.
template <class V, class Fn> void weight_panels(const WeightGemm& g, i64 panel, i64 panels, Fn multiply) {
  alignas(64) std::int32_t sums[kBlockRows * kPanel];
  const i64 step = kBlockRows / g.planes;
  Columns columns;
  for (i64 p = panel; p < panel + panels; ++p) {
    i64 first = p * kPanel, count = smaller(kPanel, g.n - first), width = round_up(count, kNarrow);
    columns.of(g.w_scale, g.bias, g.sums, first, count, 1.0, 128);  // removes the half range added to the highest byte
    for (i64 r = 0; r < g.m; r += step) {
      i64 height = smaller(step, g.m - r);
      multiply(g.x + r * g.planes * g.k, height * g.planes, g.weight + p * panel_bytes(g.k), width, sums);
      for (i64 i = 0; i < height; ++i) {
        if (g.x_scale[r + i] != g.x_scale[r + i]) {
          unusual_row<V>(g, columns, r + i, first, count, g.weight + p * panel_bytes(g.k), width);
          continue;
        }
        for (i64 j = 0; j < count; j += V::W) {
          const std::int32_t* s = sums + i * g.planes * kPanel + j;
          auto y = V::joined(s, g.planes, columns.offset + j, columns.scale + j, columns.bias + j, double{g.x_scale[r + i]});
          finish<V>(g.after, r + i, first + j, y, count - j);
        }
      }
    }
  }
}

// Products of 16-bit numbers, two for each float: their sums fit 32 bits for kChunk of k, and are put together in fp64, exactly.
constexpr i64 kChunk = 7 * kGroup;

template <class V> void wide_weight_panels(const WeightGemm& g, i64 panel, i64 panels) {
  constexpr i64 most = kBlockRows / 2;
  alignas(64) std::int32_t sums[kBlockRows * kPanel];
  alignas(64) double totals[most * kPanel];
  const i64 stride = wide_stride(g.k);
  const double unit = static_cast<double>(i64{1} << half_bits(g.planes));
  Columns columns;
  for (i64 p = panel; p < panel + panels; ++p) {
    const i64 first = p * kPanel, count = smaller(kPanel, g.n - first), width = round_up(count, kNarrow);
    const std::int8_t* w = g.weight + p * panel_bytes(g.k);
    columns.of(g.w_scale, g.bias, g.sums, first, count, 1.0, 0);
    for (i64 r = 0; r < g.m; r += most) {
      const i64 height = smaller(most, g.m - r), passes = blocks_of(width, V::NV * V::W) * blocks_of(2 * height, V::MR[V::NV]);
      for (i64 i = 0; i < height * kPanel; ++i) totals[i] = 0;
      for (i64 at = 0; at < g.k; at += kChunk) {
        Ahead ahead{w + (at + kChunk) * width, blocks_of(width * kGroup / kLine, passes)};
        sums_of_rows<V>(g.x + 2 * (r * stride + at), stride, false, 2 * height, w + at * width, kGroup * width, width,
                        smaller(kChunk, g.k - at), ahead, sums);
        for (i64 i = 0; i < height; ++i)
          for (i64 j = 0; j < width; j += V::W) V::add_halves(totals + i * kPanel + j, sums + 2 * i * kPanel + j, unit);
      }
      for (i64 i = 0; i < height; ++i) {
        if (g.x_scale[r + i] != g.x_scale[r + i]) {
          unusual_row<V>(g, columns, r + i, first, count, w, width);
          continue;
        }
        for (i64 j = 0; j < count; j += V::W) {
          auto y = V::scaled(totals + i * kPanel + j, columns.scale + j, columns.bias + j, double{g.x_scale[r + i]});
          finish<V>(g.after, r + i, first + j, y, count - j);
        }
      }
    }
  }
}

template <class V> void weight_gemm(const WeightGemm& g, i64 panel, i64 panels) {
  if constexpr (V::HALVES > 1) {
    wide_weight_panels<V>(g, panel, panels);
  } else {
    Ahead none;
    weight_panels<V>(g, panel, panels, [&](const std::uint8_t* x, i64 rows, const std::int8_t* w, i64 width, std::int32_t* to) {
      sums_of_panel<V>(x, g.k, false, rows, w, kGroup * width, width, g.k, none, to);
    });
  }
}

}  // namespace
}  // namespace fusewright::int8
