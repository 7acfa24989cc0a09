// From every member to every member an array of its own, of any length.
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
