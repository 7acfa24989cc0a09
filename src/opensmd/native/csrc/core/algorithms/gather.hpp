// Every member's array to one of them; all of the same length.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct GatherOptions {
  const void* in;
  void* const* outs;  // on the root
  size_t count;
  DType dtype;
  int root;
};

void gather(Context& context, const GatherOptions& options, const Call& call);

}  // namespace opensmd
