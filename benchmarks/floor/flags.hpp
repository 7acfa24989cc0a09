// Flags with one writer each: all that the floor's ranks tell each other. No time limits, no check that a peer lives.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <ctime>

namespace floor_ {

inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

struct alignas(128) Flag {
  std::atomic<int64_t> value;
};

// Spin for about a microsecond, then let others run: ranks may share a core.
inline void wait_for(const Flag& flag, int64_t value) {
  for (int spins = 0; flag.value.load(std::memory_order_acquire) < value; spins++) {
    if (spins < 50) _mm_pause(); else sched_yield();
  }
}

inline void raise(Flag& flag, int64_t value) { flag.value.store(value, std::memory_order_release); }

}  // namespace floor_
