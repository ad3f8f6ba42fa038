#include "pool.h"

#include <algorithm>

namespace fusewright::int8 {

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Parallel> pool{nullptr};
using Thread = int (*)();
std::atomic<Thread> thread{nullptr};

constexpr i64 kMostShares = 256;

struct alignas(64) Share {  // a cache line of its own
  std::atomic<i64> taken{0};
};

struct Work {
  Part part;
  void* work;
  i64 parts, shares;
  Share share[kMostShares];
};

void take_parts(void* p) {
  auto& w = *static_cast<Work*>(p);
  const i64 me = thread.load(std::memory_order_relaxed)();
  for (i64 s = me; s < me + w.shares; ++s) {
    const i64 whose = s % w.shares, first = w.parts * whose / w.shares, end = w.parts * (whose + 1) / w.shares;
    auto take = [&] { return first + w.share[whose].taken.fetch_add(1, std::memory_order_relaxed); };
    for (i64 i; (i = take()) < end;) w.part(w.work, i);
  }
}

}  // namespace

void set_pool(std::uintptr_t gomp_parallel, std::uintptr_t omp_get_thread_num) {
  pool = reinterpret_cast<Parallel>(gomp_parallel), thread = reinterpret_cast<Thread>(omp_get_thread_num);
}

void run_parts(Part part, void* work, i64 parts, i64 threads) {
  Parallel start = pool;
  if (parts > 1 && threads > 1 && start) {
    Work w{part, work, parts, std::min(threads, kMostShares), {}};
    // Always as many threads as torch uses, or one: libgomp terminates threads that a smaller team leaves idle.
    return start(take_parts, &w, static_cast<unsigned>(threads), 0);
  }
  for (i64 i = 0; i < parts; ++i) part(work, i);
}

}  // namespace fusewright::int8
