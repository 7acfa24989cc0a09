// The order of a group's collectives: one at a time, in the order in which they were issued.
//
//   sync, nothing pending    runs in the calling thread
//   sync, behind others      waits, and meanwhile runs what is ahead of it
//   async                    is queued; the queue's own thread (started at the first async call) runs it, or a
//                            thread that waits for it
//
// Because waiters help, an async call followed at once by wait() is nearly as cheap as a sync call: waking another core
// costs more than most collectives.
//
// Callbacks of a call's future may issue calls, too. A callback attached after the call is done runs at once, and
// issues behind all that the program has issued so far. One attached earlier runs when the call is done, and must issue
// at the same place on every rank, or their orders differ: what the program issued after asking for the future has to
// wait. So callbacks are part of the call's turn, and what they issue goes ahead of such calls. DDP's hooks rely on it:
// PowerSGD issues a bucket's later sums in callbacks, while the program goes on to the next bucket.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace opensmd {

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  // One issued call. `run` does the work and may throw; `finished` receives the outcome, outside all locks, and runs
  // callbacks. The rest is guarded by the queue's mutex.
  struct Call {
    std::function<void()> run;
    std::function<void(std::exception_ptr)> finished;
    uint64_t number = 0;           // in program order
    uint64_t callbacks_after = 0;  // the program's last call when it asked for this one's future
    bool done = false;
  };

  CallQueue() = default;  // always in a shared_ptr: its thread keeps it alive
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Runs `run` in its turn and returns when done; throws what it throws.
  template <typename Run>
  void run_now(Run&& run);

  // Queues the call and returns at once; in a callback of this queue, returns when the call has run.
  void post(std::shared_ptr<Call> call);

  // The program has asked for the call's future, so callbacks may follow.
  void expect_callbacks(Call& call);

  // Runs queued calls until this one is done.
  void help_until_done(const Call& call);

  // Returns when everything queued has run, in any thread, and ends the queue's own thread. Later calls run in the
  // posting thread.
  void drain();

  // In a forked child: the thread does not exist here and must not be joined.
  void forget_thread();

 private:
  class Turn;     // holds `running_` while one call and its callbacks run
  class Telling;  // notes the call whose outcome this thread is delivering

  // The innermost call of this queue whose callbacks this thread is running, if any.
  const Call* told_here() const;
  void enqueue(std::shared_ptr<Call> call);

  // Releases the lock and wakes one thread if there is work for it, or all threads that wait for the end: waking is a
  // system call.
  void wake_one(std::unique_lock<std::mutex>& lock);
  void run_behind_others(std::function<void()> run, std::unique_lock<std::mutex>& lock);
  void run_head(std::unique_lock<std::mutex>& lock);
  void run_and_tell(Call& call);
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Call>> pending_;
  uint64_t issued_ = 0;  // calls queued by the program
  bool running_ = false;
  std::thread::id runner_;  // of the queued call that is running; none if it runs at once
  bool closing_ = false;
  int waiting_ = 0;  // threads waiting in changed_
  int helping_ = 0;  // those that wait for a call to be done
  std::thread thread_;
};

class CallQueue::Turn {
 public:
  explicit Turn(CallQueue& queue) : queue_(queue) {}
  ~Turn() {
    std::unique_lock lock(queue_.mutex_);
    queue_.running_ = false;
    queue_.wake_one(lock);
  }

 private:
  CallQueue& queue_;
};

template <typename Run>
void CallQueue::run_now(Run&& run) {
  std::unique_lock lock(mutex_);
  if (!running_ && pending_.empty()) {
    running_ = true;
    runner_ = {};
    lock.unlock();
    Turn turn(*this);
    run();
    return;
  }
  run_behind_others([&run] { run(); }, lock);
}

}  // namespace opensmd
