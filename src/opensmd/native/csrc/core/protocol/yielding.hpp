// Giving the core away before sleeping in the kernel: the next look comes sooner than after a wake-up if the peer needs
// this core, or comes in a moment.
//
// Counted and timed: on an idle machine 200 turns take 60 µs, but beside busy processes every turn lasts until all of
// them have had their time slices (24 ms with eight on a core). Whoever yields looks after nobody.
#pragma once

#include <sched.h>

#include "core/protocol/clock.hpp"

namespace opensmd {

constexpr uint64_t kLongestYieldingNs = 1000 * 1000;

class Yielding {
 public:
  explicit Yielding(int most) : most_(most), left_(most), now_(now_ns()), end_(now_ + kLongestYieldingNs) {}

  // Yields once; false when it is time to sleep instead.
  bool once() {
    if (left_ == 0 || now_ >= end_) return false;
    --left_;
    sched_yield();
    now_ = now_ns();
    return true;
  }
  uint64_t now() const { return now_; }  // when the last turn ended
  void restart() {
    left_ = most_;
    end_ = now_ + kLongestYieldingNs;
  }

 private:
  const int most_;
  int left_;
  uint64_t now_;
  uint64_t end_;
};

}  // namespace opensmd
