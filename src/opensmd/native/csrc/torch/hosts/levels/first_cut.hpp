// The first cut of a sum in which each host sends to one other at a time. A small one goes in the frame that the host
// behind this one gets anyway: one message less, which matters where messages are few and small.
#pragma once

#include <cstring>
#include <vector>

#include "torch/hosts/agreement.hpp"
#include "torch/hosts/levels/levels.hpp"

namespace opensmd::levels {

class FirstCut {
 public:
  // `most`: of its bytes, on any host. First members have the frames, so only they may cross.
  FirstCut(const Levels& on, Agreement::Comparison& comparison, size_t most)
      : layout_(on.layout),
        comparison_(comparison),
        framed_(on.layout.fewest_on_a_host() == 1 && on.carries_one_way(most)) {}

  bool framed() const { return framed_; }
  // Whether what travels in this step of this part is the first cut.
  bool is(size_t part, size_t step) const { return framed_ && part == 0 && step == 0; }

  // Also posts the frames.
  void post(const void* cut, size_t bytes) {
    const int next = layout_.after(1);
    std::vector<size_t> sizes(static_cast<size_t>(layout_.hosts()), 0);
    sizes[static_cast<size_t>(next)] = bytes;
    if (bytes > 0) std::memcpy(comparison_.payload_for(next), cut, bytes);
    comparison_.post(sizes);
  }
  // The cut of the host before this one, once the calls have been compared.
  void take(void* into, size_t bytes) {
    if (bytes > 0) std::memcpy(into, comparison_.payload(layout_.after(layout_.hosts() - 1)), bytes);
  }

 private:
  const Layout& layout_;
  Agreement::Comparison& comparison_;
  const bool framed_;
};

}  // namespace opensmd::levels
