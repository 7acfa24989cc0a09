// Cuts an array among the members at cache lines, so that no two members write into the same line.
#pragma once

#include <algorithm>

#include "core/memory/arena.hpp"

namespace opensmd {

struct Part {
  size_t offset;
  size_t bytes;
};

inline Part part_of(size_t bytes, int members, int member) {
  const size_t n = static_cast<size_t>(members);
  const size_t each = round_up((bytes + n - 1) / n, kLine);
  const size_t offset = std::min(bytes, each * static_cast<size_t>(member));
  return {offset, std::min(each, bytes - offset)};
}

}  // namespace opensmd
