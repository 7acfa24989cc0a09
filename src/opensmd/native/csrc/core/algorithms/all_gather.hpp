// Every member's array to all members; the arrays may differ in length.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct AllGatherOptions {
  const void* in;
  void* const* outs;
  const size_t* counts;
  DType dtype;
};

void all_gather(Context& context, const AllGatherOptions& options, const Call& call);

}  // namespace opensmd
