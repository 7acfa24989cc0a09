// The order of a group's collectives: one at a time, in the order in which they were issued.
//
//   sync, nothing pending    runs in the calling thread
//   sync, behind others      waits, and meanwhile runs what is ahead of it
//   async                    is queued; whoever has time runs it: the queue's own thread (started at the first
//                            async call), or a thread that waits for it
//
// Waiters that help make an async call followed at once by wait() nearly as cheap as a sync call: a wake-up of
// another core costs more than most collectives.
//
// Callbacks of a call's future may issue calls, too. A callback that is attached when the call is done runs at once, and
// issues behind all that the program has issued so far. One that is attached earlier runs when the call is done, and must
// issue in the same place, or ranks differ in their order: what the program issued after it had asked for the future has
// to wait. So callbacks are a part of the call's turn, and what they issue goes ahead of such calls. DDP's hooks rely on it:
// PowerSGD's issue a bucket's later sums in callbacks, while the program goes on to the next bucket.
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
  // One issued call. `run` does the work and may throw; `finished` is told the outcome, outside all locks, and runs
  // callbacks. What follows is guarded by the queue's mutex.
  struct Call {
    std::function<void()> run;
    std::function<void(std::exception_ptr)> finished;
    uint64_t number = 0;           // in the order of the program
    uint64_t callbacks_after = 0;  // the last call that the program had issued when it asked for this one's future
    bool done = false;
  };

  CallQueue() = default;  // always in a shared_ptr: its thread keeps it alive
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Runs `run` in its turn and returns when it has run; throws what it throws.
  template <typename Run>
  void run_now(Run&& run);

  // Queues the call and returns at once; from a callback of this queue, when it has run.
  void post(std::shared_ptr<Call> call);

  // The program has asked for the call's future: callbacks may follow.
  void expect_callbacks(Call& call);

  // Runs queued calls until this one is done.
  void help_until_done(const Call& call);

  // Returns when everything queued has run, in whichever thread, and ends the queue's own. Calls posted later run in the
  // posting thread.
  void drain();

  // In a forked child: the thread does not exist here and must not be joined.
  void forget_thread();

 private:
  class Turn;     // holds `running_` for as long as one call and its callbacks run
  class Telling;  // notes the call of which this thread is telling the outcome

  // The call of this queue whose callbacks this thread runs, if any: the innermost.
  const Call* told_here() const;
  void enqueue(std::shared_ptr<Call> call);

  // Lets go of the lock and wakes a thread if there is something for it to run, or all that wait for the end: waking
  // is a system call.
  void wake_one(std::unique_lock<std::mutex>& lock);
  void run_behind_others(std::function<void()> run, std::unique_lock<std::mutex>& lock);
  void run_head(std::unique_lock<std::mutex>& lock);
  void run_and_tell(Call& call);
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Call>> pending_;
  uint64_t issued_ = 0;  // calls that were queued by the program
  bool running_ = false;
  std::thread::id runner_;  // of a queued call, while one runs; none of one that runs at once
  bool closing_ = false;
  int waiting_ = 0;  // threads in changed_
  int helping_ = 0;  // those among them that wait for a call to be done
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
