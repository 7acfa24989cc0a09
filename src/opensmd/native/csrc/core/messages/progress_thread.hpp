// A mailbox's helper thread: makes progress when messages are in progress and no caller waits for them.
//
// It looks every millisecond while messages come and go, and otherwise sleeps soundly, so that the usual "post, then
// wait at once" wakes no thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace opensmd {

class ProgressThread {
 public:
  struct Work {
    std::function<bool()> busy;
    std::function<bool()> progress;
  };
  explicit ProgressThread(Work work) : work_(std::move(work)) {}
  ~ProgressThread() { stop(); }

  void notice();  // something is incomplete and no caller waits for it; cheap unless the thread sleeps soundly
  void stop();

 private:
  void run();
  void sleep_soundly(std::unique_lock<std::mutex>& lock);

  Work work_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  std::atomic<bool> awake_{false};
  bool stopping_ = false;
};

}  // namespace opensmd
