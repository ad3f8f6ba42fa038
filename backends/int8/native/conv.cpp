// Convolutions of channels-last tensors: depthwise with their own kernel, pointwise as products of the tensor itself, others as
// products of rows gathered block by block in cache (im2col).
#include <algorithm>
#include <atomic>
#include <cstring>

#include "drivers.h"
#include "parts.h"
#include "pool.h"

namespace fusewright::int8 {

namespace {

constexpr i64 kLeastPixels = 16;

After from_column(After a, i64 column) {
  auto size = [](Type t) { return t == Type::f32 ? 4 : t == Type::bf16 ? 2 : 1; };
  a.out = static_cast<char*>(a.out) + column * size(a.out_type);
  if (a.residual) a.residual = static_cast<const char*>(a.residual) + column * size(a.residual_type);
  return a;
}

After from_row(After a, i64 row) {
  a = from_column(a, 0);
  auto size = [](Type t) { return t == Type::f32 ? 4 : t == Type::bf16 ? 2 : 1; };
  a.out = static_cast<char*>(a.out) + row * a.out_stride * size(a.out_type);
  if (a.residual) a.residual = static_cast<const char*>(a.residual) + row * a.residual_stride * size(a.residual_type);
  return a;
}

// The product of one group; the caller sets x and its stride.
Gemm product_of_group(const Conv& c, i64 group) {
  Gemm g;
  g.m = c.pixels(), g.n = c.n / c.groups, g.k = c.c / c.groups * c.taps();
  g.x_signed = c.x_signed, g.x_scale = &c.x_scale, g.x_zero = &c.x_zero;
  g.weight = c.weight + group * packed_bytes(g.n, g.k);
  g.sums = reinterpret_cast<const std::int32_t*>(g.weight + matrix_bytes(g.n, g.k));
  g.w_scale = c.w_scale + group * g.n;
  g.bias = c.bias ? c.bias + group * g.n : nullptr;
  g.after = from_column(c.after, group * g.n);
  return g;
}

// Whether the pixels read are contiguous, each read once.
bool is_pointwise(const Conv& c) {
  bool plain = c.taps() == 1 && c.stride_h == 1 && c.stride_w == 1 && c.oh == c.h && c.ow == c.w && c.pad_h == 0 && c.pad_w == 0;
  return plain && c.h_stride == c.w * c.w_stride && (c.batch == 1 || c.batch_stride == c.h * c.h_stride);
}

// Gather what output pixels [pixel, pixel + rows) read of `bytes` channels from `first`: rows of taps * bytes.
void gather(const Conv& c, i64 pixel, i64 rows, i64 first, i64 bytes, std::uint8_t* to) {
  const auto size = static_cast<std::size_t>(bytes);
  const bool joined = c.dilation_w == 1 && c.w_stride == bytes;
  for (i64 p = pixel; p < pixel + rows; ++p) {
    i64 y = p / c.ow % c.oh * c.stride_h - c.pad_h, x = p % c.ow * c.stride_w - c.pad_w;
    const std::uint8_t* image = c.x + p / (c.oh * c.ow) * c.batch_stride + first;
    for (i64 i = 0; i < c.kh; ++i) {
      i64 h = y + i * c.dilation_h;
      bool row_inside = h >= 0 && h < c.h;
      if (joined && row_inside && x >= 0 && x + c.kw <= c.w) {
        std::memcpy(to, image + h * c.h_stride + x * c.w_stride, size * static_cast<std::size_t>(c.kw));
        to += bytes * c.kw;
        continue;
      }
      for (i64 j = 0; j < c.kw; ++j, to += bytes) {
        i64 w = x + j * c.dilation_w;
        if (row_inside && w >= 0 && w < c.w)
          std::memcpy(to, image + h * c.h_stride + w * c.w_stride, size);
        else
          std::memset(to, c.x_zero, size);
      }
    }
  }
}

// Parts are panels of some pixels. A thread gathers once for successive parts of the same pixels.
void run_gathered(const Kernels& kernels, const Conv& c, i64 threads) {
  static std::atomic<i64> calls{0};
  static thread_local i64 gathered_call = 0, gathered_chunk = 0;
  const i64 call = ++calls, channels = c.c / c.groups, k = channels * c.taps();
  const i64 pieces = c.groups == 1 ? panels_of(c.n) : 1, rows = rows_of_part(kernels, c.pixels(), k, pieces, threads);
  parallel(parts_of(c.pixels(), rows) * pieces, threads, [&](i64 part) {
    const i64 chunk = part / pieces, pixel = chunk * rows, count = std::min(rows, c.pixels() - pixel);
    std::uint8_t* gathered = scratch<std::uint8_t, 0>(rows * k);
    const bool there = c.groups == 1 && gathered_call == call && gathered_chunk == chunk;
    for (i64 group = 0; group < c.groups; ++group) {
      Gemm g = product_of_group(c, group);
      if (!there) gather(c, pixel, count, group * channels, channels, gathered);
      g.x = gathered, g.x_stride = k, g.m = count;
      g.after = from_row(g.after, pixel);
      const i64 column = part % pieces * kPanel, columns = pieces > 1 ? std::min(kPanel, g.n - column) : g.n;
      kernels.gemm(g, 0, count, column, columns, (part + 1) % pieces * kPanel);
    }
    gathered_call = call, gathered_chunk = chunk;
  });
}

}  // namespace

void run_conv(const Kernels& kernels, const Conv& c, i64 threads) {
  if (c.pixels() == 0 || c.n == 0) return;
  if (c.groups == c.c && c.groups == c.n && c.groups > 1) {
    i64 pixels = std::max(kLeastPixels, c.pixels() / (8 * threads));
    return parallel((c.pixels() + pixels - 1) / pixels, threads, [&](i64 part) {
      std::uint8_t* strip = scratch<std::uint8_t, 0>(strip_bytes(c, pixels_of_strip(c)));
      kernels.depthwise(c, part * pixels, std::min(pixels, c.pixels() - part * pixels), strip);
    });
  }
  if (!is_pointwise(c)) return run_gathered(kernels, c, threads);
  for (i64 group = 0; group < c.groups; ++group) {
    Gemm g = product_of_group(c, group);
    g.x = c.x + group * g.k, g.x_stride = c.w_stride;
    run_gemm(kernels, g, threads);
  }
}

}  // namespace fusewright::int8
