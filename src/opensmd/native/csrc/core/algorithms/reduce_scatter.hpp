// The reduction of all members' arrays, one part on each.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct ReduceScatterOptions {
  const void* const* ins;  // one part per member
  const size_t* counts;
  void* out;  // may be ins[rank]
  DType dtype;
  Reduction reduction;
  double factor;
};

void reduce_scatter(Context& context, const ReduceScatterOptions& options, const Call& call);

}  // namespace opensmd
