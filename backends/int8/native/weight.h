// Float rows times int8 weights: widened in registers, summed in fp32. Few rows are bound by the bytes of the weight.
#pragma once

#include "gemm.h"

namespace fusewright::int8 {
namespace {

// Byte J of each lane as a float.
template <class V, int J> typename V::F widened(typename V::I word) {
  if constexpr (J < 3) word = V::shl(word, 24 - 8 * J);
  return V::to_float(V::sar(word, 24));
}

// MR rows of x by NV vectors of columns: sums of products with the bare weights, to rows of kPanel.
template <class V, int MR, int NV>
void weight_block(const float* x, i64 x_stride, const std::int8_t* w, i64 step, i64 k, float* to) {
  // One row alone has two chains of sums for each vector: a chain of one would wait for itself.
  constexpr int CHAINS = MR == 1 ? 2 : 1;
  typename V::F acc[CHAINS][MR][NV];
  for (int c = 0; c < CHAINS; ++c)
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < NV; ++v) acc[c][r][v] = V::set(0.0f);
  for (i64 at = 0; at < k; at += 4, w += step) {
    typename V::I word[NV];
    for (int v = 0; v < NV; ++v) word[v] = V::load(reinterpret_cast<const std::int32_t*>(w + v * V::W * 4));
    auto multiply = [&]<int J>() __attribute__((always_inline)) {
      typename V::F b[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) b[v] = widened<V, J>(word[v]);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        auto a = V::set(x[r * x_stride + at + J]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[J % CHAINS][r][v] = V::fma(a, b[v], acc[J % CHAINS][r][v]);
      }
    };
    multiply.template operator()<0>();
    multiply.template operator()<1>();
    multiply.template operator()<2>();
    multiply.template operator()<3>();
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) {
      auto sum = CHAINS == 2 ? V::add(acc[0][r][v], acc[CHAINS - 1][r][v]) : acc[0][r][v];
      V::store(to + r * kPanel + v * V::W, sum);
    }
}

template <class V, int MR, int NV>
void weight_rows(i64 rows, const float* x, i64 x_stride, const std::int8_t* w, i64 step, i64 k, float* to) {
  if constexpr (MR > 1) {
    if (rows < MR) return weight_rows<V, MR - 1, NV>(rows, x, x_stride, w, step, k, to);
  }
  weight_block<V, MR, NV>(x, x_stride, w, step, k, to);
}

template <class V, int NV>
void weight_columns(i64 vectors, i64 rows, const float* x, i64 x_stride, const std::int8_t* w, i64 step, i64 k, float* to) {
  if constexpr (NV > 1) {
    if (vectors < NV) return weight_columns<V, NV - 1>(vectors, rows, x, x_stride, w, step, k, to);
  }
  weight_rows<V, V::WEIGHT_MR, NV>(rows, x, x_stride, w, step, k, to);
}

// y = sums * scale + bias, each step rounded to fp32.
template <class V> void weight_gemm(const WeightGemm& g, i64 panel, i64 panels) {
  alignas(64) float sums[V::WEIGHT_MR * kPanel], scale[kPanel], bias[kPanel];
  for (i64 p = panel; p < panel + panels; ++p) {
    i64 first = p * kPanel, count = smaller(kPanel, g.n - first), width = round_up(count, kNarrow);
    for (i64 i = 0; i < kPanel; ++i) {
      scale[i] = i < count ? g.w_scale[first + i] : 0.0f;
      bias[i] = i < count && g.bias ? g.bias[first + i] : -0.0f;
    }
    const std::int8_t* w = g.weight + p * panel_bytes(g.k);
    for (i64 r = 0; r < g.m; r += V::WEIGHT_MR) {
      i64 height = smaller(V::WEIGHT_MR, g.m - r);
      for (i64 c = 0; c < width; c += V::NV * V::W) {
        i64 vectors = smaller(V::NV, (width - c) / V::W);
        weight_columns<V, V::NV>(vectors, height, g.x + r * g.x_stride, g.x_stride, w + 4 * c, 4 * width, g.k, sums + c);
      }
      for (i64 i = 0; i < height; ++i)
        for (i64 j = 0; j < count; j += V::W) {
          auto y = V::mul(V::load(sums + i * kPanel + j), V::load(scale + j));
          finish<V>(g.after, r + i, first + j, V::add(y, V::load(bias + j)), count - j);
        }
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
