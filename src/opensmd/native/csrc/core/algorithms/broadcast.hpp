// One member's array to all.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct BroadcastOptions {
  void* data;
  size_t count;
  DType dtype;
  int root;
};

void broadcast(Context& context, const BroadcastOptions& options, const Call& call);

}  // namespace opensmd
