// The kernels' work as plain data, the same for every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusewright::int8 {

using i64 = std::int64_t;

enum class Type : int { u8, s8, f32, bf16 };
enum class Post : int { none, relu, clamp, gelu, gelu_tanh, silu };

// Packed weights: panels of 64 columns (the last may be narrower, a multiple of 16), each [k / 64][width / 16][16][16][4], that is
// 64 of k by 16 columns, quad of k by quad, zero-padded along k; then the sum of every column as int32. One layout serves all
// instruction sets: 16 columns by 4 are a 64-byte line, which is a zmm register, two ymm registers, or a row of an AMX tile.
constexpr i64 kPanel = 64;
constexpr i64 kNarrow = 16;
constexpr i64 kQuad = 4;
constexpr i64 kGroup = 64;  // of k
constexpr i64 kLine = kQuad * kNarrow;
constexpr i64 kMostK = 65536;  // 65536 * 255 * 128 < 2^31

constexpr i64 kFewRows = 4;  // so few rows are memory-bound, and leave tiles mostly empty

constexpr i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }
constexpr i64 panels_of(i64 n) { return (n + kPanel - 1) / kPanel; }
constexpr i64 panel_bytes(i64 k) { return kPanel * round_up(k, kGroup); }
constexpr i64 matrix_bytes(i64 n, i64 k) { return round_up(n, kNarrow) * round_up(k, kGroup); }
// From the first column of a panel to column c in its first quad.
constexpr i64 column_bytes(i64 c) { return c / kNarrow * (kGroup * kNarrow) + kQuad * (c % kNarrow); }
// From a panel's weight at k = 0 to that at `at` in the same column.
constexpr i64 depth_bytes(i64 at, i64 width) { return at / kGroup * (kGroup * width) + at % kGroup / kQuad * kLine + at % kQuad; }
constexpr i64 packed_bytes(i64 n, i64 k) { return matrix_bytes(n, k) + 4 * round_up(n, kNarrow); }

// The epilogue of an fp32 result y: y + residual, a post-op, then rounding to a float type or quantization to [low, high].
struct After {
  const void* residual = nullptr;
  i64 residual_stride = 0;  // in elements, as is out_stride
  Type residual_type = Type::f32;
  float residual_scale = 1;
  std::int32_t residual_zero = 0;
  Post post = Post::none;
  float clamp_low = 0, clamp_high = 0;
  void* out = nullptr;
  i64 out_stride = 0;
  Type out_type = Type::f32;
  float inverse = 1;  // fp32(1 / scale)
  std::int32_t zero = 0, low = 0, high = 255;
};

// y[m, n] = (x[m, k] - zero) * scale @ (weight[n, k] * w_scale[n]).T + bias[n]
struct Gemm {
  const std::uint8_t* x = nullptr;
  i64 x_stride = 0;
  bool x_signed = false;
  i64 m = 0, n = 0, k = 0;
  const std::int8_t* weight = nullptr;
  const std::int32_t* sums = nullptr;
  const float* w_scale = nullptr;
  const float* bias = nullptr;
  const float* x_scale = nullptr;  // [m] when per_row, else [1]
  const std::int32_t* x_zero = nullptr;
  bool per_row = false;
  const std::int32_t* row_terms = nullptr;  // subtracted from every sum of a row
  After after;
};

// Float rows as integers of `planes` bytes: x = integer * scale[row]. The bytes of row r are in rows planes * r and following,
// lowest first, with half the range added to make them unsigned (see `Kernels::split` for another form). So a float product becomes
// one of integers with exact sums.
struct WeightGemm {
  const std::uint8_t* x = nullptr;
  i64 planes = 0;
  const float* x_scale = nullptr;  // NaN for a row with NaN or Inf, which is computed from `floats` instead
  const void* floats = nullptr;
  Type type = Type::f32;
  i64 floats_stride = 0;
  i64 m = 0, n = 0, k = 0;
  const std::int8_t* weight = nullptr;
  const std::int32_t* sums = nullptr;
  const float* w_scale = nullptr;
  const float* bias = nullptr;
  After after;
};

// A convolution of channels-last x[batch, h, w, c]; strides in bytes, channels contiguous.
struct Conv {
  const std::uint8_t* x = nullptr;
  i64 batch_stride = 0, h_stride = 0, w_stride = 0;
  bool x_signed = false;
  i64 batch = 0, c = 0, h = 0, w = 0;
  i64 n = 0, oh = 0, ow = 0, groups = 1;
  i64 kh = 1, kw = 1, stride_h = 1, stride_w = 1, pad_h = 0, pad_w = 0, dilation_h = 1, dilation_w = 1;
  const std::int8_t* weight = nullptr;
  const float* w_scale = nullptr;
  const float* bias = nullptr;
  float x_scale = 1;
  std::int32_t x_zero = 0;
  After after;  // rows are output pixels

  i64 taps() const { return kh * kw; }
  i64 pixels() const { return batch * oh * ow; }
};

// Depthwise weights: blocks of 64 channels, each [kw][kh / 4][64 channels][4 of kh], zero-padded along kh; then int32 sums.
constexpr i64 kMostTaps = 1024;
constexpr i64 depthwise_quads(i64 kh) { return round_up(kh, kQuad) / kQuad; }
constexpr i64 depthwise_block(i64 kh, i64 kw) { return kPanel * round_up(kh, kQuad) * kw; }
constexpr i64 depthwise_matrix_bytes(i64 c, i64 kh, i64 kw) { return round_up(c, kPanel) / kPanel * depthwise_block(kh, kw); }
constexpr i64 depthwise_bytes(i64 c, i64 kh, i64 kw) { return depthwise_matrix_bytes(c, kh, kw) + 4 * round_up(c, kPanel); }

namespace {  // see kernels.cpp

// The columns of the input that some pixels of a row read: each of them once (`shared`), or those of every pixel if they are fewer.
// `step`: from one pixel to the next; `hop`: from one tap to the next.
struct Strip {
  i64 columns, step, hop;
  bool shared;

  Strip(const Conv& c, i64 pixels)
      : columns((pixels - 1) * c.stride_w + (c.kw - 1) * c.dilation_w + 1), step(c.stride_w), hop(c.dilation_w) {
    shared = columns <= pixels * c.kw;
    if (!shared) columns = pixels * c.kw, step = c.kw, hop = 1;
  }
};

constexpr i64 kStripPixels = 16;
constexpr i64 kStripBytes = i64{1} << 14;  // with the sums they stay in the L1 cache

// Bytes that a strip of `pixels` pixels takes, with four rows of 64 channels interleaved.
inline i64 strip_bytes(const Conv& c, i64 pixels) { return Strip(c, pixels).columns * depthwise_quads(c.kh) * kQuad * kPanel; }
inline i64 pixels_of_strip(const Conv& c) {
  i64 pixels = kStripPixels;
  while (pixels > 1 && strip_bytes(c, pixels) > kStripBytes) pixels /= 2;
  return pixels;
}

}  // namespace

// The minimum and maximum of some floats and 0, and whether one is NaN.
struct Range {
  float least = 0, most = 0;
  bool nan = false;
};

// Memory of the calling thread for the rows that a kernel widens, in cache lines of its own.
std::uint8_t* scratch_of_rows(i64 bytes);

// An integer of `planes` bytes, two bits of which are spare, is a signed 16-bit number above so many bits.
constexpr int half_bits(i64 planes) { return static_cast<int>(4 * planes - 1); }

// The kernels of one instruction set. Each does part of the work on the calling thread.
struct Kernels {
  const char* name;
  i64 rows, columns;  // of a product's block
  i64 least_rows;     // of a part: beside so many, fetching weights and preparing its end cost little
  i64 cached;         // bytes of x that stay in the second-level cache while weights stream
  // `column` is a multiple of `columns`. The weights of the columns from `next` on are what the thread needs next.
  void (*gemm)(const Gemm&, i64 row, i64 rows, i64 column, i64 columns, i64 next);
  void (*weight_gemm)(const WeightGemm&, i64 panel, i64 panels);
  void (*depthwise)(const Conv&, i64 pixel, i64 pixels, std::uint8_t* strip);  // `strip_bytes` of scratch
  Range (*range)(const void* x, Type type, i64 count);
  // clamp(round(x * inverse) + zero); with `inverse64`, round(fp64(x) * inverse64 + zero)
  void (*quantize)(const void* x, Type type, i64 count, float inverse, std::int32_t zero, std::int32_t low, std::int32_t high,
                   std::uint8_t* out);
  void (*quantize64)(const void* x, Type type, i64 count, double inverse, std::int32_t zero, std::int32_t low,
                     std::int32_t high, std::uint8_t* out);
  // round(x * factor) plus half the range of `planes` bytes; byte i goes to out[i * count] and following. Sets that multiply 16-bit
  // numbers take its lower `half_bits` and the signed rest instead, in rows of such numbers.
  void (*split)(const void* x, Type type, i64 count, float factor, i64 planes, std::uint8_t* out);
  i64 (*split_bytes)(i64 planes, i64 count);  // that `split` writes
};

}  // namespace fusewright::int8
