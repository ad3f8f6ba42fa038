// Run work on the threads of the OpenMP library that torch has loaded. It is not linked: its functions are passed by address, so
// that the process has only one pool, whichever library it is.
#pragma once

#include <atomic>

#include "types.h"

namespace fusewright::int8 {

// void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags) and int omp_get_thread_num(); 0 for none: then all
// work is serial.
void set_pool(std::uintptr_t gomp_parallel, std::uintptr_t omp_get_thread_num);

using Part = void (*)(void* work, i64 part);
void run_parts(Part part, void* work, i64 parts, i64 threads);

// Call f(part) for each part, on up to `threads` threads. Each has a share of successive parts, so that what one layer leaves in a
// core's cache is what the next reads there; when it is done it takes parts of others, so that a slow core does not delay them.
template <class Fn> void parallel(i64 parts, i64 threads, Fn f) {
  run_parts([](void* work, i64 part) { (*static_cast<Fn*>(work))(part); }, &f, parts, threads);
}

}  // namespace fusewright::int8
