// Copies between tensors of one layout on the current device's current stream, by the driver: a dispatched copy takes twice as long.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include "call.h"
#include "current_device.h"

namespace fusewright::native {

// `copy` is cuMemcpyDtoDAsync or hipMemcpyDtoDAsync.
struct Copying {
  std::uintptr_t copy;
  std::int64_t device;
  CurrentDevice current;
};

// call(tensors): copy each to the address and the bytes of its target. False if another device is current; raises RuntimeError if
// the driver refuses.
std::unique_ptr<Body> copy_in(const Copying& how, std::vector<std::pair<std::int64_t, std::size_t>> targets);

// call() -> new tensors with the content of `sources`: (address, bytes, size, stride, dtype). None if another device is current.
std::unique_ptr<Body> copy_out(const Copying& how,
                               const std::vector<std::tuple<std::int64_t, std::size_t, PyObject*, PyObject*, PyObject*>>& sources);

}  // namespace fusewright::native
