#include "torch/queue.hpp"

#include <algorithm>
#include <optional>
#include <utility>

namespace opensmd {

// Callbacks may run calls of other queues, which have callbacks, too.
class CallQueue::Telling {
 public:
  Telling(const CallQueue& queue, const Call& call) : queue_(queue), call_(call), outer_(innermost_) { innermost_ = this; }
  ~Telling() { innermost_ = outer_; }
  Telling(const Telling&) = delete;
  Telling& operator=(const Telling&) = delete;

  static const Call* find(const CallQueue& queue) {
    const Telling* found = innermost_;
    while (found != nullptr && &found->queue_ != &queue) found = found->outer_;
    return found == nullptr ? nullptr : &found->call_;
  }

 private:
  static thread_local const Telling* innermost_;
  const CallQueue& queue_;
  const Call& call_;
  const Telling* outer_;
};

thread_local const CallQueue::Telling* CallQueue::Telling::innermost_ = nullptr;

const CallQueue::Call* CallQueue::told_here() const { return Telling::find(*this); }

void CallQueue::enqueue(std::shared_ptr<Call> call) {
  const Call* told = told_here();
  if (told == nullptr) {
    call->number = ++issued_;
    pending_.push_back(std::move(call));
    return;
  }
  call->number = std::max(told->number, told->callbacks_after);
  const auto later = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const auto& each) { return each->number > call->number; });
  pending_.insert(later, std::move(call));
}

void CallQueue::expect_callbacks(Call& call) {
  std::lock_guard lock(mutex_);
  if (call.callbacks_after == 0) call.callbacks_after = issued_;
}

void CallQueue::post(std::shared_ptr<Call> call) {
  std::unique_lock lock(mutex_);
  enqueue(call);
  // A callback may wait on the future of a call it issued, which does not help (torch's PowerSGD does so), and it would
  // wait for its own thread.
  if (closing_ || told_here() != nullptr) {
    lock.unlock();
    help_until_done(*call);
    return;
  }
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  wake_one(lock);
}

void CallQueue::wake_one(std::unique_lock<std::mutex>& lock) {
  const bool waited_for = waiting_ > 0 && !running_;
  const bool all = closing_;
  const bool one = !pending_.empty();
  lock.unlock();
  if (waited_for && all) {
    changed_.notify_all();
  } else if (waited_for && one) {
    changed_.notify_one();
  }
}

void CallQueue::help_until_done(const Call& call) {
  const bool has_turn = told_here() != nullptr;
  std::unique_lock lock(mutex_);
  while (!call.done) {
    if ((has_turn || !running_) && !pending_.empty()) {
      run_head(lock);
    } else {
      ++waiting_;
      ++helping_;
      changed_.wait(lock);
      --helping_;
      --waiting_;
    }
  }
  // This thread may have been woken to run what it now leaves.
  wake_one(lock);
}

void CallQueue::run_behind_others(std::function<void()> run, std::unique_lock<std::mutex>& lock) {
  std::exception_ptr outcome;
  auto call = std::make_shared<Call>();
  call->run = std::move(run);
  call->finished = [&outcome](std::exception_ptr error) { outcome = std::move(error); };
  enqueue(call);
  lock.unlock();
  help_until_done(*call);
  if (outcome) std::rethrow_exception(outcome);
}

// Called, and returns, with the lock held; releases it while the call runs.
void CallQueue::run_head(std::unique_lock<std::mutex>& lock) {
  auto call = std::move(pending_.front());
  pending_.pop_front();
  const bool in_callback = std::exchange(running_, true);  // its turn continues
  runner_ = std::this_thread::get_id();
  lock.unlock();
  {
    std::optional<Turn> turn;
    if (!in_callback) turn.emplace(*this);
    run_and_tell(*call);
  }
  lock.lock();
  call->done = true;
  if (helping_ > 0) changed_.notify_all();
}

void CallQueue::run_and_tell(Call& call) {
  std::exception_ptr error;
  try {
    call.run();
  } catch (...) {
    error = std::current_exception();
  }
  call.run = nullptr;  // releases the tensors
  Telling telling(*this, call);
  call.finished(error);
  call.finished = nullptr;
}

void CallQueue::serve() {
  std::unique_lock lock(mutex_);
  while (!(closing_ && pending_.empty())) {
    if (!running_ && !pending_.empty()) {
      run_head(lock);
    } else {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
    }
  }
}

void CallQueue::drain() {
  std::unique_lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  // Wait for a queued call that another thread runs. One that this thread runs may, as it ended, have dropped the last
  // reference to its group.
  const auto others = [this] { return runner_ != std::thread::id() && runner_ != std::this_thread::get_id(); };
  const bool has_turn = told_here() != nullptr;
  while (running_ && !has_turn ? others() : !pending_.empty()) {
    if (has_turn || !running_) {
      run_head(lock);
    } else {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
    }
  }
  changed_.notify_all();  // wakes the queue's own thread, if all this ran in a callback's turn
  if (!thread_.joinable()) return;
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // a callback of this group dropped its last reference
  } else {
    thread.join();
  }
}

void CallQueue::forget_thread() {
  if (thread_.joinable()) thread_.detach();
}

}  // namespace opensmd
