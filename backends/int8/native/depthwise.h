// Depthwise convolution: for each output pixel, four taps of 4 W channels at a time, with the dot product of the matrix kernels.
#pragma once

#include "gemm.h"

namespace fusewright::int8 {
namespace {

constexpr i64 kMostTaps = 1024;
constexpr i64 kEndRows = 16;  // pixels whose sums go through the epilogue together

// An output pixel and the addresses of its taps: null for taps in the padding and those that pad the last group of four.
class Window {
 public:
  Window(const Conv& conv, i64 pixel)
      : c(conv), image(pixel / (c.oh * c.ow)), y(pixel / c.ow % c.oh), x(pixel % c.ow) {
    place();
  }
  const std::uint8_t* const* taps() const { return at; }
  void next() {
    const bool was_inside = inside;
    if (++x == c.ow) x = 0, image += ++y == c.oh, y = y == c.oh ? 0 : y;
    if (!was_inside || x == 0 || left() + (c.kw - 1) * c.dilation_w >= c.w) return place();
    for (i64 t = 0; t < c.taps(); ++t) at[t] += c.stride_w * c.w_stride;
  }

 private:
  i64 top() const { return y * c.stride_h - c.pad_h; }
  i64 left() const { return x * c.stride_w - c.pad_w; }
  void place() {
    if (image >= c.batch) return;  // past the last image
    const std::uint8_t* base = c.x + image * c.batch_stride;
    inside = true;
    i64 t = 0;
    for (i64 i = 0; i < c.kh; ++i)
      for (i64 j = 0; j < c.kw; ++j, ++t) {
        i64 h = top() + i * c.dilation_h, w = left() + j * c.dilation_w;
        bool there = h >= 0 && h < c.h && w >= 0 && w < c.w;
        at[t] = there ? base + h * c.h_stride + w * c.w_stride : nullptr;
        inside = inside && there;
      }
    for (; t % kQuad; ++t) at[t] = nullptr;
  }

  const Conv& c;
  i64 image, y, x;
  bool inside = false;  // whether the whole window is
  const std::uint8_t* at[kMostTaps];
};

// Sums of 4 W channels of a pixel, from `first`. Only `bytes` of them exist; the lanes after them have no weights and read the
// next pixel, or a copy at the end of the tensor.
template <class V>
void depthwise_sums(const Conv& c, const std::uint8_t* const* taps, const std::uint8_t* zeros, i64 first, i64 bytes,
                    const std::int8_t* w, const std::uint8_t* end, std::int32_t* to) {
  constexpr i64 WIDE = 4 * V::W;
  typename V::I acc[4] = {V::set(0), V::set(0), V::set(0), V::set(0)};
  alignas(64) std::uint8_t copy[4][WIDE];
  for (i64 t = 0; t < c.taps(); t += kQuad, w += kQuad * kPanel) {
    const std::uint8_t* from[4];
    for (int s = 0; s < 4; ++s) {
      from[s] = taps[t + s] ? taps[t + s] + first : zeros;
      if (bytes < WIDE && taps[t + s] && from[s] + WIDE > end) {
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
  alignas(64) std::int32_t sums[kEndRows * kPanel];
  Columns columns;
  auto of_columns = reinterpret_cast<const std::int32_t*>(c.weight + round_up(c.c, kPanel) * round_up(c.taps(), kQuad));
  const std::uint8_t* end = c.x + (c.batch - 1) * c.batch_stride + (c.h - 1) * c.h_stride + (c.w - 1) * c.w_stride + c.c;
  const bool quick = ends_quickly(c.after);
  Levels levels;
  for (i64 block = 0; block < c.c; block += kPanel) {
    i64 count = smaller(kPanel, c.c - block);
    std::int32_t zero = c.x_zero + (c.x_signed ? 128 : 0);
    columns.of(c.w_scale, c.bias, of_columns, block, count, static_cast<double>(c.x_scale), zero);
    if (quick) levels.of(columns, c.after, c.taps());
    const std::int8_t* w = c.weight + block / kPanel * depthwise_block(c.taps());
    Window window(c, pixel);
    for (i64 p = pixel, rows; p < pixel + pixels; p += rows) {
      rows = smaller(kEndRows, pixel + pixels - p);
      for (i64 r = 0; r < rows; ++r, window.next())
        for (i64 part = 0; part < count; part += WIDE)
          depthwise_sums<V>(c, window.taps(), zeros, block + part, count - part, w + part, end, sums + r * kPanel + part);
      if (levels.usable) {
        finish_quickly<V>(c.after, columns, levels, p, rows, block, count, sums);
        continue;
      }
      for (i64 r = 0; r < rows; ++r) finish_exactly<V, false>(c.after, columns, p + r, block, 0, count, sums + r * kPanel);
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
