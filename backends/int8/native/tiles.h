// 8-bit products on AMX tiles: 32 rows by 32 columns in four tiles of sums, a group of k at a time. Source: Intel SDM volume 1,
// chapter 18. `Tiles` provides the instructions: the real ones, or their emulation in C++ for other CPUs.
#pragma once

#include <initializer_list>

#include "gemm.h"

namespace fusewright::int8 {
namespace {

constexpr i64 kTile = 16;  // rows of a tile, and its columns of int32
constexpr i64 kTileRows = 2 * kTile, kTileColumns = 2 * kTile;

enum Tile : int { SUM00, SUM01, SUM10, SUM11, X0, X1, W0, W1 };

// The shapes of the eight tiles, as LDTILECFG reads them.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};

  // `upper` and `lower`: rows of the two tiles of x, 1 to 16 and 0 to 16.
  TileConfig(i64 upper, i64 lower) {
    for (int t : {SUM00, SUM01, X0}) size(t, upper);
    for (int t : {SUM10, SUM11, X1}) size(t, lower);
    for (int t : {W0, W1}) size(t, kTile);
  }

 private:
  void size(int tile, i64 count) {
    rows[tile] = static_cast<std::uint8_t>(count);
    bytes[tile] = count ? 64 : 0;
  }
};
static_assert(sizeof(TileConfig) == 64);

// A block: up to 32 `rows` of x by 32 columns, or 16.
struct TileWork {
  const std::uint8_t* x;
  i64 x_stride, rows, k;
  const std::int8_t* w;
  i64 step;                   // bytes from one group of k to the next
  const std::int32_t* begin;  // what the sums of each row begin with
  bool past;                  // 64 bytes of x may be read where the last k % 64 begin
  const std::int8_t* ahead;   // the weights that the thread needs next: lines [line, end_line) of each group are fetched
  i64 line, end_line;
};

template <class T, bool SIGNED, bool TALL, bool WIDE> void tile_step(const std::uint8_t* x, i64 x_stride, const std::int8_t* w) {
  T::template load<X0>(x, x_stride);
  T::template load<W0>(w, kLine);
  T::template dot<SUM00, X0, W0, SIGNED>();
  if constexpr (WIDE) {
    T::template load<W1>(w + column_bytes(kTile), kLine);
    T::template dot<SUM01, X0, W1, SIGNED>();
  }
  if constexpr (TALL) {
    T::template load<X1>(x + kTile * x_stride, x_stride);
    T::template dot<SUM10, X1, W0, SIGNED>();
    if constexpr (WIDE) T::template dot<SUM11, X1, W1, SIGNED>();
  }
}

// The last k % 64. Weights are padded with zeros, so what is multiplied by them does not count.
template <class T, bool SIGNED, bool TALL, bool WIDE> void tile_rest(const TileWork& t, i64 at, const std::int8_t* w) {
  if (t.past) return tile_step<T, SIGNED, TALL, WIDE>(t.x + at, t.x_stride, w);
  alignas(64) std::uint8_t x[kTileRows][kGroup] = {};
  for (i64 r = 0; r < t.rows; ++r) __builtin_memcpy(x[r], t.x + r * t.x_stride + at, static_cast<std::size_t>(t.k - at));
  tile_step<T, SIGNED, TALL, WIDE>(x[0], kGroup, w);
}

template <class T, bool SIGNED, bool TALL, bool WIDE> void tile_block(const TileWork& t, std::int32_t* to) {
  T::template load<SUM00>(t.begin, 0);
  if constexpr (WIDE) T::template load<SUM01>(t.begin + kTile, 0);
  if constexpr (TALL) T::template load<SUM10>(t.begin, 0);
  if constexpr (TALL && WIDE) T::template load<SUM11>(t.begin + kTile, 0);
  const std::int8_t *w = t.w, *ahead = t.ahead;
  i64 at = 0;
  for (; at + kGroup <= t.k; at += kGroup, w += t.step, ahead += t.step) {
    for (i64 l = t.line; l < t.end_line; ++l) __builtin_prefetch(ahead + kLine * l, 0, 2);
    tile_step<T, SIGNED, TALL, WIDE>(t.x + at, t.x_stride, w);
  }
  if (at < t.k) tile_rest<T, SIGNED, TALL, WIDE>(t, at, w);
  T::template store<SUM00>(to, 4 * kPanel);
  if constexpr (WIDE) T::template store<SUM01>(to + kTile, 4 * kPanel);
  if constexpr (TALL) T::template store<SUM10>(to + kTile * kPanel, 4 * kPanel);
  if constexpr (TALL && WIDE) T::template store<SUM11>(to + kTile * kPanel + kTile, 4 * kPanel);
}

template <class T, bool SIGNED> auto tile_block_of(bool tall, bool wide) {
  if (tall) return wide ? tile_block<T, SIGNED, true, true> : tile_block<T, SIGNED, true, false>;
  return wide ? tile_block<T, SIGNED, false, true> : tile_block<T, SIGNED, false, false>;
}

// Configures the tiles when the height of a block changes.
template <class T> class TileRows {
 public:
  TileRows() = default;
  TileRows(const TileRows&) = delete;
  ~TileRows() { T::release(); }
  void of(i64 height) {
    if (height != configured) T::configure({smaller(height, kTile), height - smaller(height, kTile)});
    configured = height;
  }

 private:
  i64 configured = 0;
};

template <class V, class T> void tile_gemm(const Gemm& g, i64 row, i64 rows, i64 column, i64 columns, i64 next) {
  if (rows <= kFewRows) return gemm<V>(g, row, rows, column, columns, next);
  alignas(64) std::int32_t sums[kTileRows * kPanel];
  TileRows<T> sizes;
  const i64 blocks = blocks_of(rows, kTileRows);
  const i64 readable = (g.m - 1) * g.x_stride + g.k;  // bytes of x
  for (i64 c = column, end = column + columns, count; c < end; c += count) {
    const Weights w(g, c);
    count = smaller(kPanel - c % kPanel, end - c);
    const Ends<V, false, true> ends(g, c, count);
    const std::int8_t* ahead = Weights(g, c + count < end ? c + count : next).at;
    const i64 group_lines = round_up(count, kNarrow), lines = blocks_of(group_lines, blocks * blocks_of(count, kTileColumns));
    for (i64 r = row, line = 0; r < row + rows; r += kTileRows) {
      const i64 height = smaller(kTileRows, row + rows - r);
      const bool past = (r + height - 1) * g.x_stride + round_up(g.k, kGroup) <= readable;
      sizes.of(height);
      for (i64 j = 0; j < count; j += kTileColumns, line += lines) {
        const bool tall = height > kTile, wide = count - j > kTile;
        auto run = g.x_signed ? tile_block_of<T, true>(tall, wide) : tile_block_of<T, false>(tall, wide);
        run({g.x + r * g.x_stride, g.x_stride, height, g.k, w.at + column_bytes(j), w.step, ends.begin() + j, past, ahead, line,
             smaller(line + lines, group_lines)}, sums + j);
      }
      ends.finish(r, height, sums);
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
