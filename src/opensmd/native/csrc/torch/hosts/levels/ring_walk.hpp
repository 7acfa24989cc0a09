// How parts go along a ring of hosts, or from each host to one other at a time. At each tick every part in progress
// advances one step, the latest first: it has waited least, and what it sends is in transit while an earlier one is
// waited for.
#pragma once

#include <algorithm>
#include <cstddef>

#include "torch/hosts/agreement.hpp"
#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {

// Two hosts make no ring. Along one, narrow floats would be rounded, and small integers overflow, once per host.
inline bool can_go_along_a_ring(const Levels& on, const Signature& signature) {
  return on.framed && on.layout.hosts() != 2 && !is_narrow(signature.dtype) &&
         TwoSums::serve(signature.dtype, signature.reduction);
}

struct RingWalk {
  size_t parts;
  size_t last;  // step; the first is 0

  // Calls sum.go_on(part, step) for all, in order, and sum.expect(part, step) in the same order, as far ahead as
  // receives are posted. Meanwhile the calls are compared; `posts`: the sum posts the frames for that, in the first
  // step.
  template <typename Sum>
  void run(Agreement::Comparison& comparison, Sum& sum, bool posts = false) const {
    const auto expect = [&sum](size_t index, size_t step) { sum.expect(index, step); };
    const auto go_on = [&sum, &comparison](size_t index, size_t step) {
      // Nothing before this waits for other hosts: the next part's first step is already in transit.
      if (index == 0 && step == 1) comparison.conclude();
      sum.go_on(index, step);
    };
    const size_t ticks = parts + last;
    for (size_t tick = 0; tick < std::min(kAhead, ticks); ++tick) for_parts_at(tick, expect);
    comparison.meet();
    if (!posts) comparison.post();
    for (size_t tick = 0; tick < ticks; ++tick) {
      for_parts_at(tick, go_on);
      if (tick + kAhead < ticks) for_parts_at(tick + kAhead, expect);
    }
  }

 private:
  template <typename Action>
  void for_parts_at(size_t tick, Action action) const {
    const size_t earliest = tick > last ? tick - last : 0;
    for (size_t i = std::min(tick + 1, parts); i > earliest; --i) action(i - 1, tick - (i - 1));
  }
};

}  // namespace opensmd::levels
