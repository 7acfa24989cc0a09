// Gives the core away before sleeping in the kernel: if the peer needs this core, or arrives in a moment, the next look
// comes sooner than after a wake-up.
//
// Limited by count and time: on an idle machine 200 turns take 60 µs, but beside busy processes every turn lasts until
// all of them have had their time slices (24 ms with eight on a core). A yielding thread checks on no peers. The kernel
// wakes sleepers long before it returns to a thread that has yielded, so one that has found its core crowded goes
// straight to sleep for a while: small calls between two virtual hosts then took a third of the time on crowded cores.
#pragma once

#include <sched.h>

#include <algorithm>

#include "core/protocol/clock.hpp"

namespace opensmd {

constexpr uint64_t kLongestYieldingNs = 1000 * 1000;

// Whether other processes want a thread's core, judging by its turns: a turn as long as a time slice must not cost more
// than a small share of the time.
class Crowding {
 public:
  void note_turn(uint64_t begin, uint64_t end) {
    if (end - begin >= kSlice) until_ = end + kTurnsWorth * std::min(end - begin, kLongest);
  }
  bool lasts(uint64_t now) const { return now < until_; }

 private:
  static constexpr uint64_t kSlice = 500 * 1000, kLongest = 10 * 1000 * 1000, kTurnsWorth = 50;
  uint64_t until_ = 0;
};

class Yielding {
 public:
  explicit Yielding(int most) : most_(most), left_(most), now_(now_ns()), end_(now_ + kLongestYieldingNs) {}

  // Yields once; false when it is time to sleep instead.
  bool once() {
    if (left_ == 0 || now_ >= end_ || crowding().lasts(now_)) return false;
    --left_;
    const uint64_t begin = now_;
    sched_yield();
    now_ = now_ns();
    crowding().note_turn(begin, now_);
    return true;
  }
  uint64_t now() const { return now_; }  // when the last turn ended
  void restart() {
    left_ = most_;
    end_ = now_ + kLongestYieldingNs;
  }

 private:
  static Crowding& crowding() {
    static thread_local Crowding of_this_thread;
    return of_this_thread;
  }

  const int most_;
  int left_;
  uint64_t now_;
  uint64_t end_;
};

}  // namespace opensmd
