// The reduction of all members' arrays, on one of them.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct ReduceOptions {
  const void* in;
  void* out;  // on the root; may be `in`
  size_t count;
  DType dtype;
  Reduction reduction;
  int root;
  double factor;
};

void reduce(Context& context, const ReduceOptions& options, const Call& call);

}  // namespace opensmd
