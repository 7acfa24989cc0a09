#include "core/messages/progress_thread.hpp"

#include <pthread.h>
#include <sched.h>

#include "core/protocol/clock.hpp"

namespace opensmd {

namespace {
constexpr auto kTick = std::chrono::milliseconds{1};
constexpr int kTicksUntilSleep = 50;
constexpr uint64_t kEagerNs = 100 * 1000;  // how long to go on looking after the last byte moved
}  // namespace

void ProgressThread::notice() {
  if (awake_.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_ || awake_.load()) return;
  awake_.store(true);
  if (thread_.joinable()) {
    wake_.notify_one();
    return;
  }
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "smd-progress");
}

// Looks once more after announcing its sleep: a thread with work checks the announcement after adding work, so that at
// least one sees the other.
void ProgressThread::sleep_soundly(std::unique_lock<std::mutex>& lock) {
  awake_.store(false);
  lock.unlock();  // a notifying thread holds the lock that the look takes
  const bool busy = work_.busy();
  lock.lock();
  if (busy) awake_.store(true);
  wake_.wait(lock, [this] { return stopping_ || awake_.load(); });
}

void ProgressThread::run() {
  int idle_ticks = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (idle_ticks >= kTicksUntilSleep) {
      sleep_soundly(lock);
      idle_ticks = 0;
    }
    wake_.wait_for(lock, kTick, [this] { return stopping_; });
    lock.unlock();
    ++idle_ticks;
    uint64_t moved = now_ns();
    while (work_.busy() && now_ns() - moved < kEagerNs) {
      if (work_.progress()) moved = now_ns();
      idle_ticks = 0;
      sched_yield();
    }
    lock.lock();
  }
}

void ProgressThread::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace opensmd
