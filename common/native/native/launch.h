// Launching a kernel of the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "call.h"

namespace fusewright::native {

// launch(block, workers, *values) -> the kernel's code: writes addresses of tensors, and numbers, to `places` (words) of the
// argument block at address `block`, and calls the function at `kernel` with (block, workers), without Python's lock.
std::unique_ptr<Body> launch(std::uintptr_t kernel, std::vector<std::int32_t> places);

}  // namespace fusewright::native
