// Every member ends with the reduction of all members' arrays, in place and bitwise the same everywhere.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

struct AllReduceOptions {
  void* data;
  size_t count;
  DType dtype;
  Reduction reduction;
  double factor;
};

void all_reduce(Context& context, const AllReduceOptions& options, const Call& call);

}  // namespace opensmd
