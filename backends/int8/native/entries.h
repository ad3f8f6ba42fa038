// The core's operations as plans launch them: `int64 f(const int64 *words, int64 threads)`, 0 on success. `words` holds addresses,
// integers, and floats as the bits of a double, in the order that `fusewright_int8/run/words.py` lists.
#pragma once

#include "types.h"

namespace fusewright::int8 {

using Entry = i64 (*)(const i64* words, i64 threads);

struct NamedEntry {
  const char* name;
  Entry run;
};

extern const NamedEntry kEntries[7];

// The kernels of the instruction set in use; see cpu.h.
const Kernels& kernels();
void use(const char* name);

}  // namespace fusewright::int8
