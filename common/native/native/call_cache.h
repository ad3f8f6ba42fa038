// Calls of Python functions that allocate results and launch device kernels, by the layout of their arguments: what a call did is
// done again without Python.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "call.h"
#include "current_device.h"
#include "launch_queue.h"

namespace fusewright::native {

// Where an address comes from: argument k, or -1 - k for allocation k; bytes from its start; where the kernel reads it, as an
// offset into the launch's memory.
using Pointer = std::tuple<int, std::int64_t, std::size_t>;

// A tensor descriptor (CUtensorMap), encoded for the address of a `Pointer`: the driver's type, then for each dimension, the
// innermost first, sizes, strides in bytes (without the first) and sizes of a block, and the swizzle.
using Encoding = std::tuple<Pointer, int, std::vector<std::uint64_t>, std::vector<std::uint64_t>, std::vector<std::uint32_t>, int>;

// A launch: function, blocks, threads, bytes of shared memory; its memory with everything but addresses filled in; the offset of
// each parameter.
using LaunchStep = std::tuple<std::uintptr_t, unsigned, unsigned, unsigned, std::string, std::vector<std::size_t>,
                              std::vector<Pointer>, std::vector<Encoding>>;

// call(...) -> what `run(...)` returns. The second call with arguments of the same layout, or the first if `at_once`, is
// `trace(...)`, which returns the result and None, or what to do from then on:
// (device, allocations as (size, stride, dtype), launches as `LaunchStep`, which allocation is the result).
// `encode` is the address of cuTensorMapEncodeTiled (0: none).
std::unique_ptr<Body> call_cache(PyObject* run, PyObject* trace, const LaunchFunctions& driver, std::uintptr_t encode,
                                 const CurrentDevice& current, bool at_once);

}  // namespace fusewright::native
