// What a Group is made of.
#pragma once

#include "context.hpp"

namespace opensmd {

struct GroupParts {
  explicit GroupParts(GroupConfig config) : context(std::move(config)) {}
  Context context;
};

}  // namespace opensmd
