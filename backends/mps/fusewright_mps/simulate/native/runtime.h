// Threads of a dispatch on a CPU: the functions that compiled kernels call, and the one that runs them.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
    uint32_t x, y, z;
};

namespace shim {

enum class Space { device, threadgroup };
enum class Access { read, write, atomic };

/// Memory that a pointer may access, with its name in the source.
struct Region {
    const char* name;
    const void* begin;
    const void* end;
    Space space;
};

/// A buffer as passed to a dispatch.
struct Argument {
    void* data;
    Region region;
};

/// The position of a thread.
struct Thread {
    uint3 in_grid, in_group, group_in_grid, grid, group;
    uint32_t index, lane, simd, simds;
};

struct Report {
    int32_t line;
    char text[500];
};

using Body = void (*)(const Argument*, const Thread&);

extern "C" {
/// Run a kernel for all threads. `meets`: its threads synchronize at barriers or in simdgroup functions. Return 1 on an error.
int shim_dispatch(Body body, const Argument* args, uint32_t count, const uint32_t* threads, const uint32_t* group, int meets,
                  int order, Report* report);
}

void barrier(int flags, int line);
void simd_barrier(int flags, int line);
const void* exchange(const void* value, size_t bytes, int line, uint32_t* active);
uint32_t lane();
void share(Region* region);
void look(const Region* region, const void* where, size_t bytes, size_t alignment, Access access, int line);
bool fails_for_no_reason();

}  // namespace shim
