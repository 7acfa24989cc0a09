// The first cut of a sum in which each host sends to one other at a time. A small one goes with the frame that the host behind
// this one gets in any case: a message less, which counts where there are few and small ones.
#pragma once

#include <cstring>
#include <vector>

#include "torch/hosts/agreement.hpp"
#include "torch/hosts/levels/levels.hpp"

namespace opensmd::levels {

class FirstCut {
 public:
  // `most`: of its bytes, on any host. First members have the frames, and so must be the only ones that cross.
  FirstCut(const Levels& on, Agreement::Comparison& comparison, size_t most)
      : layout_(on.layout),
        comparison_(comparison),
        framed_(on.layout.fewest_on_a_host() == 1 && on.carries_one_way(most)) {}

  bool framed() const { return framed_; }
  // Whether what travels in this step of this part is this cut.
  bool is(size_t part, size_t step) const { return framed_ && part == 0 && step == 0; }

  // Posts the frames, too.
  void post(const void* cut, size_t bytes) {
    const int next = layout_.after(1);
    std::vector<size_t> sizes(static_cast<size_t>(layout_.hosts()), 0);
    sizes[static_cast<size_t>(next)] = bytes;
    if (bytes > 0) std::memcpy(comparison_.payload_for(next), cut, bytes);
    comparison_.post(sizes);
  }
  // That of the host before this one, after the calls have been compared.
  void take(void* into, size_t bytes) {
    if (bytes > 0) std::memcpy(into, comparison_.payload(layout_.after(layout_.hosts() - 1)), bytes);
  }

 private:
  const Layout& layout_;
  Agreement::Comparison& comparison_;
  const bool framed_;
};

}  // namespace opensmd::levels
