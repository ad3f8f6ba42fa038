// The tile instructions of AMX-INT8 in C++, after the pseudocode of Intel SDM volume 2, to run the tile kernels on CPUs without
// tiles. Uses that would fault on hardware trap here too.
#pragma once

#include "../tiles.h"

namespace fusewright::int8 {
namespace {

struct Tiles {
  struct State {
    bool configured;
    TileConfig sizes{0, 0};
    std::uint8_t bytes[8][16][64];
  };
  static State& state() {
    static thread_local State s{};
    return s;
  }
  static void check(bool fine) {
    if (!fine) __builtin_trap();
  }
  static bool usable(int t) { return state().configured && state().sizes.rows[t] && state().sizes.bytes[t]; }
  static void clear() { __builtin_memset(state().bytes, 0, sizeof state().bytes); }

  static void configure(const TileConfig& c) {
    check(c.palette == 1 && c.start_row == 0);
    for (int t = 0; t < 16; ++t) check(c.rows[t] <= 16 && c.bytes[t] <= 64 && !c.rows[t] == !c.bytes[t] && (t < 8 || !c.rows[t]));
    state().configured = true, state().sizes = c;
    clear();
  }
  static void release() { state().configured = false, clear(); }
  template <int T> static void zero() {
    check(usable(T));
    __builtin_memset(state().bytes[T], 0, sizeof state().bytes[T]);
  }
  template <int T> static void load(const void* p, i64 stride) {
    zero<T>();
    for (int r = 0; r < state().sizes.rows[T]; ++r)
      __builtin_memcpy(state().bytes[T][r], static_cast<const char*>(p) + r * stride, state().sizes.bytes[T]);
  }
  template <int T> static void store(void* p, i64 stride) {
    check(usable(T));
    for (int r = 0; r < state().sizes.rows[T]; ++r)
      __builtin_memcpy(static_cast<char*>(p) + r * stride, state().bytes[T][r], state().sizes.bytes[T]);
  }
  template <int SUM, int X, int W, bool SIGNED> static void dot() {
    const auto& s = state().sizes;
    check(usable(SUM) && usable(X) && usable(W));
    check(s.bytes[SUM] == s.bytes[W] && s.rows[SUM] == s.rows[X] && s.bytes[X] == 4 * s.rows[W]);
    auto& b = state().bytes;
    for (int m = 0; m < s.rows[SUM]; ++m)
      for (int n = 0; n < s.bytes[SUM] / 4; ++n) {
        std::uint32_t sum;
        __builtin_memcpy(&sum, b[SUM][m] + 4 * n, 4);
        for (int k = 0; k < s.bytes[X]; ++k) {
          std::int32_t x = SIGNED ? static_cast<std::int8_t>(b[X][m][k]) : b[X][m][k];
          sum += static_cast<std::uint32_t>(x * static_cast<std::int8_t>(b[W][k / 4][4 * n + k % 4]));
        }
        __builtin_memcpy(b[SUM][m] + 4 * n, &sum, 4);
      }
  }
};

}  // namespace
}  // namespace fusewright::int8
