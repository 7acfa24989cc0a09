// Each member's multiplier for premul_sum, exchanged beside the entry lines.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

class Factors {
 public:
  Factors(Context& context, uint64_t sequence, Reduction reduction, double mine)
      : context_(context), parity_(sequence & 1), used_(reduction == Reduction::PremulSum) {
    if (used_) context_.arena.member(context_.rank).sizes[parity_].factor = mine;
  }

  // Call after all have met. nullptr if the reduction takes none.
  const double* all() {
    if (!used_) return nullptr;
    for (int i = 0; i < context_.size; ++i) values_[i] = context_.arena.member(i).sizes[parity_].factor;
    return values_;
  }

 private:
  Context& context_;
  uint64_t parity_;
  bool used_;
  double values_[kMaxMembers];
};

}  // namespace opensmd
