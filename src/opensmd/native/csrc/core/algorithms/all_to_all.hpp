// A separate array, of any length, from every member to every member.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct AllToAllOptions {
  const void* const* ins;
  const size_t* in_counts;
  void* const* outs;
  const size_t* out_counts;
  DType dtype;
};

void all_to_all(Context& context, const AllToAllOptions& options, const Call& call);

}  // namespace opensmd
