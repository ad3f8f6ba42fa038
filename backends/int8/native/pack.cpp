// Packs weights in the order in which products read them (see types.h), with the sums of their columns.
#include <cstring>

#include "drivers.h"

namespace fusewright::int8 {

namespace {

// Packs weight_of(n, k) for the whole matrix.
template <class Fn> void pack_matrix(i64 n, i64 k, Fn weight_of, std::int8_t* to) {
  std::memset(to, 0, static_cast<std::size_t>(packed_bytes(n, k)));
  auto sums = reinterpret_cast<std::int32_t*>(to + matrix_bytes(n, k));
  for (i64 i = 0; i < n; ++i) {
    i64 panel = i / kPanel, column = i % kPanel, left = n - panel * kPanel;
    i64 width = round_up(left < kPanel ? left : kPanel, kNarrow);
    std::int8_t* p = to + panel * panel_bytes(k) + column_bytes(column);
    std::int32_t sum = 0;
    for (i64 j = 0; j < k; ++j) {
      std::int8_t w = weight_of(i, j);
      p[depth_bytes(j, width)] = w;
      sum += w;
    }
    sums[i] = sum;
  }
}

}  // namespace

void pack(const std::int8_t* weight, i64 n_stride, i64 k_stride, i64 n, i64 k, std::int8_t* to, bool is_signed) {
  const int flip = is_signed ? 0 : 0x80;
  pack_matrix(n, k, [=](i64 i, i64 j) { return static_cast<std::int8_t>(weight[i * n_stride + j * k_stride] ^ flip); }, to);
}

void pack_conv(const std::int8_t* weight, const i64 (&stride)[4], i64 n, i64 c, i64 kh, i64 kw, i64 groups, std::int8_t* to) {
  const i64 rows = n / groups, k = c * kh * kw;
  for (i64 g = 0; g < groups; ++g) {
    auto weight_of = [&](i64 i, i64 j) {
      i64 tap = j / c;
      return weight[(g * rows + i) * stride[0] + j % c * stride[1] + tap / kw * stride[2] + tap % kw * stride[3]];
    };
    pack_matrix(rows, k, weight_of, to + g * packed_bytes(rows, k));
  }
}

void pack_depthwise(const std::int8_t* weight, const i64 (&stride)[4], i64 c, i64 kh, i64 kw, std::int8_t* to) {
  std::memset(to, 0, static_cast<std::size_t>(depthwise_bytes(c, kh, kw)));
  auto sums = reinterpret_cast<std::int32_t*>(to + depthwise_matrix_bytes(c, kh, kw));
  for (i64 i = 0; i < c; ++i) {
    std::int8_t* block = to + i / kPanel * depthwise_block(kh, kw);
    for (i64 y = 0; y < kh; ++y)
      for (i64 x = 0; x < kw; ++x) {
        std::int8_t w = weight[i * stride[0] + y * stride[2] + x * stride[3]];
        block[((x * depthwise_quads(kh) + y / kQuad) * kPanel + i % kPanel) * kQuad + y % kQuad] = w;
        sums[i] += w;
      }
  }
}

}  // namespace fusewright::int8
