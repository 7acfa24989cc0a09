// The check that all collectives with a root share.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

inline void check_root(const Context& context, Operation operation, int root) {
  if (root >= 0 && root < context.size) return;
  throw std::invalid_argument(std::string(name_of(operation)) + " got root " + std::to_string(root) +
                              ", which is not one of the group's ranks 0 to " + std::to_string(context.size - 1));
}

}  // namespace opensmd
