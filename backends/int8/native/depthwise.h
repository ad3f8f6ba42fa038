// Depthwise convolution. The input columns that some pixels of a row read are interleaved once, four rows of the window at a time;
// then each tap column is a dot product of the matrix kernels, in lanes of one channel.
#pragma once

#include "gemm.h"

namespace fusewright::int8 {
namespace {

constexpr int kPixels = 8;  // pixels that share a load of weights
constexpr i64 kColumnBytes = kQuad * kPanel;

// The rows of the window of one output row in a block of channels, and the columns of them that `strip` holds.
template <class V> class Rows {
  static constexpr i64 WIDE = 4 * V::W;

 public:
  explicit Rows(const Conv& conv) : c(conv), quads(depthwise_quads(conv.kh)), end(end_of(conv)) {
    for (auto& z : zeros) z = static_cast<std::uint8_t>(c.x_zero);
  }

  // Of output row `row` of all images, channels [first, first + count).
  void place(i64 row, i64 first, i64 count_) {
    const std::uint8_t* image = c.x + row / c.oh * c.batch_stride + first;
    const i64 top = row % c.oh * c.stride_h - c.pad_h;
    count = count_;
    for (i64 i = 0; i < quads * kQuad; ++i) {
      const i64 h = top + i * c.dilation_h;
      rows[i] = i < c.kh && h >= 0 && h < c.h ? image + h * c.h_stride : nullptr;
    }
  }

  // Fill the strip for `pixels` pixels from column x of the output on.
  void fill(i64 x, i64 pixels, std::uint8_t* strip) const {
    const Strip s(c, pixels);
    const i64 left = x * c.stride_w - c.pad_w;
    for (i64 q = 0; q < quads; ++q)
      for (i64 part = 0; part < count; part += WIDE) {
        std::uint8_t* to = strip + q * kColumnBytes + kQuad * part;
        if (s.shared) {
          for (i64 i = 0; i < s.columns; ++i, to += quads * kColumnBytes) column(q, part, left + i, to);
          continue;
        }
        for (i64 p = 0; p < pixels; ++p)
          for (i64 j = 0; j < c.kw; ++j, to += quads * kColumnBytes) column(q, part, left + p * c.stride_w + j * c.dilation_w, to);
      }
  }

 private:
  static const std::uint8_t* end_of(const Conv& c) {
    return c.x + (c.batch - 1) * c.batch_stride + (c.h - 1) * c.h_stride + (c.w - 1) * c.w_stride + c.c;
  }

  // Four rows of column w, channels [part, part + WIDE).
  void column(i64 q, i64 part, i64 w, std::uint8_t* to) const {
    // Lanes after the last channel have no weights: they read the next pixel, or a copy at the end of the tensor.
    alignas(64) std::uint8_t copy[kQuad][WIDE];
    const std::uint8_t* from[kQuad];
    const bool inside = w >= 0 && w < c.w;
    for (i64 i = 0; i < kQuad; ++i) {
      const std::uint8_t* row = rows[q * kQuad + i];
      from[i] = inside && row ? row + w * c.w_stride + part : zeros;
    }
    if (count - part < WIDE)
      for (i64 i = 0; i < kQuad; ++i)
        if (from[i] != zeros && from[i] + WIDE > end) {
          __builtin_memcpy(copy[i], from[i], static_cast<std::size_t>(count - part));
          from[i] = copy[i];
        }
    V::interleave(from, c.x_signed ? 0x80 : 0, count - part > WIDE / 2, to);
  }

  const Conv& c;
  i64 quads, count = 0;
  const std::uint8_t* end;
  const std::uint8_t* rows[kMostTaps + kQuad];
  alignas(64) std::uint8_t zeros[WIDE];
};

// Sums of W channels of PIXELS pixels that are `step` bytes apart in the strip. `hop`: bytes between the columns of their taps.
template <class V, int PIXELS>
void depthwise_sums(const std::uint8_t* strip, i64 step, i64 hop, i64 kw, i64 quads, const std::int8_t* w, std::int32_t* to) {
  typename V::I acc[PIXELS];
#pragma GCC unroll 8
  for (int p = 0; p < PIXELS; ++p) acc[p] = V::set(0);
  for (i64 j = 0; j < kw; ++j, strip += hop)
    for (i64 q = 0; q < quads; ++q, w += kColumnBytes) {
      auto b = V::load_b(w);
      const std::uint8_t* from = strip + q * kColumnBytes;
#pragma GCC unroll 8
      for (int p = 0; p < PIXELS; ++p) acc[p] = V::dot(acc[p], V::load_a(from + p * step), b);
    }
#pragma GCC unroll 8
  for (int p = 0; p < PIXELS; ++p) V::store(to + p * kPanel, acc[p]);
}

template <class V, int PIXELS>
void some_pixels(i64 pixels, const std::uint8_t* strip, i64 step, i64 hop, i64 kw, i64 quads, const std::int8_t* w, std::int32_t* to) {
  if constexpr (PIXELS > 1) {
    if (pixels < PIXELS) return some_pixels<V, PIXELS - 1>(pixels, strip, step, hop, kw, quads, w, to);
  }
  depthwise_sums<V, PIXELS>(strip, step, hop, kw, quads, w, to);
}

template <class V>
void sums_of_strip(const Conv& c, i64 pixels, i64 count, const std::uint8_t* strip, const std::int8_t* w, std::int32_t* to) {
  const Strip s(c, pixels);
  const i64 quads = depthwise_quads(c.kh), column = quads * kColumnBytes, step = s.step * column, hop = s.hop * column;
  const i64 blocks = (pixels + kPixels - 1) / kPixels;
  for (i64 part = 0; part < count; part += V::W)
    for (i64 block = 0, p = 0; block < blocks; ++block) {
      const i64 some = (pixels - p + blocks - block - 1) / (blocks - block);
      some_pixels<V, kPixels>(some, strip + p * step + kQuad * part, step, hop, c.kw, quads, w + kQuad * part, to + p * kPanel + part);
      p += some;
    }
}

template <class V> void depthwise(const Conv& c, i64 pixel, i64 pixels, std::uint8_t* strip) {
  alignas(64) std::int32_t sums[kStripPixels * kPanel] = {};
  Columns columns;
  auto of_columns = reinterpret_cast<const std::int32_t*>(c.weight + depthwise_matrix_bytes(c.c, c.kh, c.kw));
  const bool quick = ends_quickly(c.after);
  const i64 most = pixels_of_strip(c);
  Levels levels;
  Rows<V> rows(c);
  for (i64 block = 0; block < c.c; block += kPanel) {
    i64 count = smaller(kPanel, c.c - block);
    std::int32_t zero = c.x_zero + (c.x_signed ? 128 : 0);
    columns.of(c.w_scale, c.bias, of_columns, block, count, static_cast<double>(c.x_scale), zero);
    if (quick) levels.of(columns, c.after, count, c.taps());
    const std::int8_t* w = c.weight + block / kPanel * depthwise_block(c.kh, c.kw);
    for (i64 p = pixel, some; p < pixel + pixels; p += some) {
      const i64 x = p % c.ow;
      some = smaller(smaller(most, c.ow - x), pixel + pixels - p);
      if (x == 0 || p == pixel) rows.place(p / c.ow, block, count);
      rows.fill(x, some, strip);
      sums_of_strip<V>(c, some, count, strip, w, sums);
      if (levels.usable) {
        finish_quickly<V, false>(c.after, columns, levels, p, some, block, count, sums);
        continue;
      }
      for (i64 r = 0; r < some; ++r) finish_exactly<V, false>(c.after, columns, p + r, block, 0, count, sums + r * kPanel);
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
