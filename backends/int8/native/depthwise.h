// Depthwise convolution: for each output pixel, four taps of 4 W channels at a time through the same dot product as matrices.
#pragma once

#include "gemm.h"

namespace fusewright::int8 {
namespace {

constexpr i64 kMostTaps = 1024;

// Where the taps of an output pixel lie, null for those in the padding and those that fill the last four.
inline void find_taps(const Conv& c, i64 pixel, const std::uint8_t** taps) {
  i64 image = pixel / (c.oh * c.ow), y = pixel / c.ow % c.oh, x = pixel % c.ow;
  const std::uint8_t* base = c.x + image * c.batch_stride;
  i64 t = 0;
  for (i64 i = 0; i < c.kh; ++i)
    for (i64 j = 0; j < c.kw; ++j, ++t) {
      i64 h = y * c.stride_h - c.pad_h + i * c.dilation_h, w = x * c.stride_w - c.pad_w + j * c.dilation_w;
      bool inside = h >= 0 && h < c.h && w >= 0 && w < c.w;
      taps[t] = inside ? base + h * c.h_stride + w * c.w_stride : nullptr;
    }
  for (; t % kQuad; ++t) taps[t] = nullptr;
}

// Sums of 4 W channels at `first` of a pixel. `bytes` of them exist; fewer than 4 W are read through a copy.
template <class V>
void depthwise_sums(const Conv& c, const std::uint8_t* const* taps, const std::uint8_t* zeros, i64 first, i64 bytes,
                    const std::int8_t* w, std::int32_t* to) {
  constexpr i64 WIDE = 4 * V::W;
  typename V::I acc[4] = {V::set(0), V::set(0), V::set(0), V::set(0)};
  alignas(64) std::uint8_t copy[4][WIDE];
  for (i64 t = 0; t < c.taps(); t += kQuad, w += kQuad * kPanel) {
    const std::uint8_t* from[4];
    for (int s = 0; s < 4; ++s) {
      from[s] = taps[t + s] ? taps[t + s] + first : zeros;
      if (bytes < WIDE && taps[t + s]) {
        __builtin_memcpy(copy[s], from[s], static_cast<std::size_t>(bytes));
        from[s] = copy[s];
      }
    }
    typename V::A quads[4];
    V::interleave(from, quads);
    for (int j = 0; j < 4; ++j) {
      auto a = c.x_signed ? V::flip(quads[j]) : quads[j];
      acc[j] = V::dot(acc[j], a, V::load_b(w + 64 * j));
    }
  }
  V::store_interleaved(to, acc);
}

template <class V> void depthwise(const Conv& c, i64 pixel, i64 pixels) {
  constexpr i64 WIDE = 4 * V::W;
  alignas(64) std::uint8_t zeros[WIDE];
  for (auto& z : zeros) z = static_cast<std::uint8_t>(c.x_zero);
  alignas(64) std::int32_t sums[WIDE];
  const std::uint8_t* taps[kMostTaps];
  Columns columns;
  auto of_columns = reinterpret_cast<const std::int32_t*>(c.weight + round_up(c.c, kPanel) * round_up(c.taps(), kQuad));
  std::int32_t zero = c.x_zero + (c.x_signed ? 128 : 0);
  for (i64 block = 0; block < c.c; block += kPanel) {
    i64 count = smaller(kPanel, c.c - block);
    columns.of(c.w_scale, c.bias, of_columns, block, count, static_cast<double>(c.x_scale), zero);
    const std::int8_t* w = c.weight + block / kPanel * depthwise_block(c.taps());
    for (i64 p = pixel; p < pixel + pixels; ++p) {
      find_taps(c, p, taps);
      for (i64 part = 0; part < count; part += WIDE) {
        depthwise_sums<V>(c, taps, zeros, block + part, count - part, w + part, sums);
        for (i64 j = 0; j < smaller(WIDE, count - part); j += V::W) {
          auto s = V::sub(V::load(sums + j), V::load(columns.offset + part + j));
          auto y = V::scaled(s, columns.scale + part + j, columns.bias + part + j);
          finish<V>(c.after, p, block + part + j, y, count - part - j);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
