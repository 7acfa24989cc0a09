// Sleeping on a word of shared memory. Each sleep is bounded: sleepers check on their peers in between.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace opensmd {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, uint64_t nanoseconds) {
  timespec bound{static_cast<time_t>(nanoseconds / 1000000000u), static_cast<long>(nanoseconds % 1000000000u)};
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT, seen, &bound, nullptr, 0);
}

// Counts a sleeper while it lives. Sequentially consistent, as the waker's read of the count must be: otherwise each
// could miss the other.
class Sleeper {
 public:
  explicit Sleeper(std::atomic<uint32_t>& count) : count_(count) { count_.fetch_add(1, std::memory_order_seq_cst); }
  ~Sleeper() { count_.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  std::atomic<uint32_t>& count_;
};

inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace opensmd
