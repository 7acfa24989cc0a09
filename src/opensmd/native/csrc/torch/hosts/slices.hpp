// One run of memory cut among members, as the calls of core/group.hpp take it.
#pragma once

#include <cstddef>
#include <vector>

#include "core/kernels/types.hpp"
#include "core/memory/parts.hpp"

namespace opensmd {

struct Slices {
  std::vector<char*> data;
  std::vector<size_t> counts;  // of elements

  void* const* outputs() const { return reinterpret_cast<void* const*>(data.data()); }
  const void* const* inputs() const { return reinterpret_cast<const void* const*>(data.data()); }
};

// Even slices for the first `takers` of so many members, none for the others.
inline Slices cut(void* data, size_t count, DType dtype, int takers, int members) {
  const size_t width = size_of(dtype);
  Slices found;
  for (int i = 0; i < members; ++i) {
    const auto [offset, bytes] = part_of(count * width, takers, i);
    found.data.push_back(static_cast<char*>(data) + offset);
    found.counts.push_back(bytes / width);
  }
  return found;
}

}  // namespace opensmd
