// Whether weights are what constants were made of.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "call.h"

namespace fusewright::native {

// watch(tensors) -> whether these are the same objects as those that it was made with, at the same addresses and versions. It
// holds none of them. Null with an error set.
std::unique_ptr<Body> watch(PyObject* tensors);

// words() -> whether the words at (address, bytes: 1, 2, 4 or 8) are what they were. The memory must still be there.
std::unique_ptr<Body> words(const std::vector<std::pair<std::uintptr_t, int>>& places);

}  // namespace fusewright::native
