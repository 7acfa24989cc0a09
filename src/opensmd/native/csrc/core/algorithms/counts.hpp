// Per-member counts as part of a signature.
#pragma once

#include <cstddef>
#include <cstdint>

namespace opensmd {

inline uint64_t hash_of_counts(const size_t* counts, int size) {
  uint64_t hash = 0;
  for (int i = 0; i < size; ++i) hash = (hash ^ counts[i]) * 0x9e3779b97f4a7c15u + (hash >> 31);
  return hash;
}

}  // namespace opensmd
