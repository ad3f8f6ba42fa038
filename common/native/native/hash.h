// A hash of words, for maps.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusewright::native {

struct Hash {
  template <typename Words>
  std::size_t operator()(const Words& words) const {
    std::uint64_t h = 0x9e3779b97f4a7c15u;
    for (auto word : words) h = (h ^ static_cast<std::uint64_t>(word)) * 0xff51afd7ed558ccdu, h ^= h >> 32;
    return h;
  }
};

}  // namespace fusewright::native
