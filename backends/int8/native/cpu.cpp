// CPU features from CPUID, and the state that the system saves on a context switch from XGETBV. Source: Intel SDM volume 1,
// chapters 13 and 15.
#include "cpu.h"

#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusewright::int8 {

extern const Kernels amx_int8, avx512_vnni, avx_vnni, avx2, portable, amx_simulated;

namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};

bool bit(unsigned word, int at) { return word >> at & 1; }

// The register sets that the system saves, as bits of XCR0.
std::uint64_t saved() {
  if (!bit(Leaf(1, 0).c, 27)) return 0;  // OSXSAVE
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

// Linux grants the 8 KiB of tile registers to a process on request.
bool tiles_granted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

std::vector<const Kernels*> find() {
  constexpr std::uint64_t ymm = 0x6, zmm = 0xE6, tiles = 0x60000;
  const std::uint64_t state = saved();
  const Leaf one(1, 0), seven(7, 0), more(7, 1);
  bool has_avx2 = bit(one.c, 12) && bit(seven.b, 5) && (state & ymm) == ymm;  // with FMA
  bool has_avx512 = has_avx2 && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31) && bit(seven.c, 11) &&
                    (state & zmm) == zmm;  // F, DQ, BW, VL, VNNI
  bool has_amx = has_avx512 && bit(seven.d, 24) && bit(seven.d, 25) && (state & tiles) == tiles;

  std::vector<const Kernels*> found;
#ifdef FUSEWRIGHT_HAS_AMX
  if (has_amx && tiles_granted()) found.push_back(&amx_int8);
#endif
  if (has_avx512) found.push_back(&avx512_vnni);
#ifdef FUSEWRIGHT_HAS_AVX_VNNI
  if (has_avx2 && bit(more.a, 4)) found.push_back(&avx_vnni);
#endif
  if (has_avx2) found.push_back(&avx2);
  found.push_back(&portable);
  found.push_back(&amx_simulated);
  return found;
}

}  // namespace

const std::vector<const Kernels*>& runnable() {
  static const std::vector<const Kernels*> found = find();
  return found;
}

}  // namespace fusewright::int8
