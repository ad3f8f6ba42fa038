// The tile instructions of AMX-INT8, as inline assembly: the compilers' intrinsics require a literal tile number and reject
// template arguments.
#pragma once

#include "../tiles.h"

namespace fusewright::int8 {
namespace {

struct Tiles {
  static void configure(const TileConfig& c) { __asm__ volatile("ldtilecfg %0" ::"m"(c)); }
  static void release() { __asm__ volatile("tilerelease" ::); }
  template <int T> static void zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
  template <int T> static void load(const void* p, i64 stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T> static void store(void* p, i64 stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int SUM, int X, int W, bool SIGNED> static void dot() {
    if constexpr (SIGNED)
      __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
    else
      __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  }
};

}  // namespace
}  // namespace fusewright::int8
