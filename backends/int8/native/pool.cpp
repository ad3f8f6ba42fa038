#include "pool.h"

namespace fusewright::int8 {

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Parallel> pool{nullptr};

struct Work {
  Part part;
  void* work;
  i64 parts;
  std::atomic<i64> next{0};
};

void take_parts(void* p) {
  auto& w = *static_cast<Work*>(p);
  for (i64 i; (i = w.next.fetch_add(1, std::memory_order_relaxed)) < w.parts;) w.part(w.work, i);
}

}  // namespace

void set_pool(std::uintptr_t gomp_parallel) { pool = reinterpret_cast<Parallel>(gomp_parallel); }

void run_parts(Part part, void* work, i64 parts, i64 threads) {
  Work w{part, work, parts};
  Parallel start = pool;
  // Always as many threads as torch uses, or one: libgomp terminates threads that a smaller team leaves idle.
  if (parts > 1 && threads > 1 && start)
    start(take_parts, &w, static_cast<unsigned>(threads), 0);
  else
    take_parts(&w);
}

}  // namespace fusewright::int8
