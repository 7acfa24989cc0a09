// One array per member, from one of them; all of the same length.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct ScatterOptions {
  const void* const* ins;  // on the root
  void* out;
  size_t count;
  DType dtype;
  int root;
};

void scatter(Context& context, const ScatterOptions& options, const Call& call);

}  // namespace opensmd
