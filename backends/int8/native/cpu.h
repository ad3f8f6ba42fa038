// The instruction sets that this CPU and system can run.
#pragma once

#include <vector>

#include "types.h"

namespace fusewright::int8 {

// Kernels that can run here, best first; the AMX simulation is last.
const std::vector<const Kernels*>& runnable();

}  // namespace fusewright::int8
