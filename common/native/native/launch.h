// Launch a CPU kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "call.h"

namespace fusewright::native {

// launch(block, workers, *values) -> the kernel's error code: write tensor addresses and numbers to `places` (word indices) of the
// argument block at address `block`, then call the function at `kernel` with (block, workers), without the GIL.
std::unique_ptr<Body> launch(std::uintptr_t kernel, std::vector<std::int32_t> places);

}  // namespace fusewright::native
