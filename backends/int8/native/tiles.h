// 8-bit products on AMX tiles: 32 rows by 32 columns in four tiles of sums, 64 of k at a time. Source: Intel SDM volume 1,
// chapter 18. `Tiles` provides the instructions: the real ones, or their emulation in C++ for other CPUs.
#pragma once

#include <initializer_list>

#include "gemm.h"

namespace fusewright::int8 {
namespace {

constexpr i64 kTile = 16;  // rows of a tile, and its columns of int32
constexpr i64 kTileRows = 2 * kTile;
constexpr i64 kTileK = 64;
constexpr i64 kDeep = 448;  // depth of k per pass: 64 columns of weights and 32 rows of x of this length stay in the L1 cache
constexpr i64 kHighRows = 4 * kTileRows;  // rows whose sums are kept between passes

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

// A part of a product: up to 32 `rows` of x by 32 columns, or 16 if WIDE is false.
struct TileWork {
  const std::uint8_t* x;
  i64 x_stride;
  const std::int8_t* w;
  i64 step;  // bytes from one quad of k to the next
  i64 rows, k;
};

template <class T, bool SIGNED, bool TALL, bool WIDE>
void tile_step(const std::uint8_t* x, i64 x_stride, const std::int8_t* w, i64 w_stride) {
  T::template load<X0>(x, x_stride);
  T::template load<W0>(w, w_stride);
  T::template dot<SUM00, X0, W0, SIGNED>();
  if constexpr (WIDE) {
    T::template load<W1>(w + 64, w_stride);
    T::template dot<SUM01, X0, W1, SIGNED>();
  }
  if constexpr (TALL) {
    T::template load<X1>(x + kTile * x_stride, x_stride);
    T::template dot<SUM10, X1, W0, SIGNED>();
    if constexpr (WIDE) T::template dot<SUM11, X1, W1, SIGNED>();
  }
}

// The last k % 64, copied because neither x nor the weights may be read past their ends.
template <class T, bool SIGNED, bool TALL, bool WIDE> void tile_rest(const TileWork& t, i64 at) {
  alignas(64) std::uint8_t x[kTileRows][kTileK] = {};
  alignas(64) std::int8_t w[kTile][128] = {};
  for (i64 r = 0; r < t.rows; ++r) __builtin_memcpy(x[r], t.x + r * t.x_stride + at, static_cast<std::size_t>(t.k - at));
  for (i64 q = 0; 4 * q < t.k - at; ++q) __builtin_memcpy(w[q], t.w + (at / 4 + q) * t.step, WIDE ? 128 : 64);
  tile_step<T, SIGNED, TALL, WIDE>(x[0], kTileK, w[0], 128);
}

// Start sums at 0, or (ADDS) at those in `to`.
template <class T, bool ADDS, int SUM> void tile_begin(const std::int32_t* to) {
  if constexpr (ADDS)
    T::template load<SUM>(to, 4 * kPanel);
  else
    T::template zero<SUM>();
}

template <class T, bool SIGNED, bool ADDS, bool TALL, bool WIDE> void tile_block(const TileWork& t, std::int32_t* to) {
  tile_begin<T, ADDS, SUM00>(to);
  if constexpr (WIDE) tile_begin<T, ADDS, SUM01>(to + kTile);
  if constexpr (TALL) tile_begin<T, ADDS, SUM10>(to + kTile * kPanel);
  if constexpr (TALL && WIDE) tile_begin<T, ADDS, SUM11>(to + kTile * kPanel + kTile);
  i64 at = 0;
  for (; at + kTileK <= t.k; at += kTileK)
    tile_step<T, SIGNED, TALL, WIDE>(t.x + at, t.x_stride, t.w + at / 4 * t.step, t.step);
  if (at < t.k) tile_rest<T, SIGNED, TALL, WIDE>(t, at);
  T::template store<SUM00>(to, 4 * kPanel);
  if constexpr (WIDE) T::template store<SUM01>(to + kTile, 4 * kPanel);
  if constexpr (TALL) T::template store<SUM10>(to + kTile * kPanel, 4 * kPanel);
  if constexpr (TALL && WIDE) T::template store<SUM11>(to + kTile * kPanel + kTile, 4 * kPanel);
}

template <class T, bool SIGNED, bool ADDS> void tile_panel(const TileWork& all, i64 width, std::int32_t* to) {
  bool tall = all.rows > kTile;
  for (i64 c = 0; c < width; c += 2 * kTile) {
    TileWork t = all;
    t.w += 4 * c;
    bool wide = width - c >= 2 * kTile;
    auto run = tall ? (wide ? tile_block<T, SIGNED, ADDS, true, true> : tile_block<T, SIGNED, ADDS, true, false>)
                    : (wide ? tile_block<T, SIGNED, ADDS, false, true> : tile_block<T, SIGNED, ADDS, false, false>);
    run(t, to + c);
  }
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

// Sums of rows [row, row + rows) by a panel at `w`, `width` wide. Each part of k covers all rows before the next part, so that its
// weights stay in the L1 cache.
template <class T> void tile_sums(const Gemm& g, TileRows<T>& sizes, i64 row, i64 rows, const std::int8_t* w, i64 width, std::int32_t* to) {
  const i64 parts = (g.k + kDeep - 1) / kDeep, deep = parts > 1 ? round_up((g.k + parts - 1) / parts, kTileK) : kDeep;
  i64 at = 0;
  do {
    for (i64 r = 0; r < rows; r += kTileRows) {
      i64 height = smaller(kTileRows, rows - r);
      sizes.of(height);
      TileWork t{g.x + (row + r) * g.x_stride + at, g.x_stride, w + at * width, 4 * width, height, smaller(deep, g.k - at)};
      auto run = at ? (g.x_signed ? tile_panel<T, true, true> : tile_panel<T, false, true>)
                    : (g.x_signed ? tile_panel<T, true, false> : tile_panel<T, false, false>);
      run(t, width, to + r * kPanel);
    }
    at += deep;
  } while (at < g.k);
}

template <class V, class T> void tile_gemm(const Gemm& g, i64 row, i64 rows, i64 panel, i64 panels) {
  if (rows <= kFewRows) return gemm<V>(g, row, rows, panel, panels);
  alignas(64) std::int32_t sums[kHighRows * kPanel];
  const i64 step = g.k > kDeep ? kHighRows : kTileRows;
  TileRows<T> sizes;
  for (i64 p = panel; p < panel + panels; ++p) {
    i64 first = p * kPanel, count = smaller(kPanel, g.n - first), width = round_up(count, kNarrow);
    const Ends<V, false> ends(g, first, count);
    for (i64 r = row; r < row + rows; r += step) {
      i64 height = smaller(step, row + rows - r);
      tile_sums(g, sizes, r, height, g.weight + p * panel_bytes(g.k), width, sums);
      ends.finish(r, height, sums);
    }
  }
}

}  // namespace
}  // namespace fusewright::int8
