// Work on the threads of the OpenMP library that torch has loaded. It is not linked: its functions come by address, so that
// there is one pool in the process, whichever library that is.
#pragma once

#include <atomic>

#include "types.h"

namespace fusewright::int8 {

// void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags); 0 for none: all work is serial then.
void set_pool(std::uintptr_t gomp_parallel);

using Part = void (*)(void* work, i64 part);
void run_parts(Part part, void* work, i64 parts, i64 threads);

// f(part) for each part, on up to `threads` threads. A thread takes the next part when it is done with one, so that a slow
// core holds up nobody.
template <class Fn> void parallel(i64 parts, i64 threads, Fn f) {
  run_parts([](void* work, i64 part) { (*static_cast<Fn*>(work))(part); }, &f, parts, threads);
}

}  // namespace fusewright::int8
