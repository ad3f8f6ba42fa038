// How an operation is divided into parts, and memory for them.
#pragma once

#include <algorithm>
#include <vector>

#include "types.h"

namespace fusewright::int8 {

constexpr i64 kMostRows = 1024;  // of a part

constexpr i64 parts_of(i64 n, i64 size) { return (n + size - 1) / size; }

// Rows of a part of a product of m rows, of which `pieces` parts compute the same rows: as many as the cache holds, but the same
// number for each thread if there are enough, as in the layers around, or fewer if there would be too few parts.
inline i64 rows_of_part(const Kernels& kernels, i64 m, i64 k, i64 pieces, i64 threads) {
  const i64 unit = kernels.rows, least = kernels.least_rows, fair = std::min(threads, m / least);
  i64 chunks = parts_of(m, std::clamp(kernels.cached / std::max<i64>(k, 1), least, kMostRows));
  if (fair > 1) chunks = round_up(chunks, fair);
  while (chunks * pieces < 2 * threads && m > chunks * unit) chunks *= 2;
  const i64 rows = parts_of(m, chunks);
  return rows < 8 * unit ? rows : round_up(rows, unit);
}

// Scratch memory of the calling thread, kept for its next call, in cache lines of its own: tiles read rows of 64 bytes. Buffers in use
// at the same time have different `Slot`s.
template <class T, int Slot> T* scratch(i64 count) {
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  static thread_local std::vector<Line> kept;
  const auto lines = static_cast<std::size_t>(parts_of(count * static_cast<i64>(sizeof(T)), 64));
  if (kept.size() < lines) kept.resize(lines);
  return reinterpret_cast<T*>(kept.data());
}

}  // namespace fusewright::int8
