#include "torch/queue.hpp"

#include <utility>

namespace opensmd {

namespace {

// The queue of which this thread is telling an outcome, if any.
thread_local const CallQueue* telling = nullptr;

}  // namespace

void CallQueue::post(std::shared_ptr<Call> call) {
  std::unique_lock lock(mutex_);
  pending_.push_back(call);
  // A callback may wait for what it issues by a future, which does not help (torch's PowerSGD does), and the
  // thread that it would wait for is its own.
  if (closing_ || telling == this) {
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
  std::unique_lock lock(mutex_);
  while (!call.done) {
    if (!running_ && !pending_.empty()) {
      run_head(lock);
    } else {
      ++waiting_;
      ++helping_;
      changed_.wait(lock);
      --helping_;
      --waiting_;
    }
  }
  // This thread may have been woken to run what it now leaves behind.
  wake_one(lock);
}

void CallQueue::run_behind_others(std::function<void()> run, std::unique_lock<std::mutex>& lock) {
  std::exception_ptr outcome;
  auto call = std::make_shared<Call>();
  call->run = std::move(run);
  call->finished = [&outcome](std::exception_ptr error) { outcome = std::move(error); };
  pending_.push_back(call);
  lock.unlock();
  help_until_done(*call);
  if (outcome) std::rethrow_exception(outcome);
}

// Called and left with the lock held, and let go while the call runs.
void CallQueue::run_head(std::unique_lock<std::mutex>& lock) {
  auto call = std::move(pending_.front());
  pending_.pop_front();
  running_ = true;
  runner_ = std::this_thread::get_id();
  lock.unlock();
  std::exception_ptr error;
  {
    Turn turn(*this);
    try {
      call->run();
    } catch (...) {
      error = std::current_exception();
    }
    call->run = nullptr;  // lets go of the tensors
  }
  // Callbacks may themselves issue collectives, so this is not part of the turn.
  const CallQueue* before = std::exchange(telling, this);
  call->finished(error);
  call->finished = nullptr;
  telling = before;
  lock.lock();
  call->done = true;
  if (helping_ > 0) changed_.notify_all();
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
  // A queued call that another thread runs is waited for. One that this thread runs may have dropped, when it ended,
  // the last reference to its group.
  const auto others = [this] { return runner_ != std::thread::id() && runner_ != std::this_thread::get_id(); };
  while (running_ ? others() : !pending_.empty()) {
    if (!running_) {
      run_head(lock);
    } else {
      ++waiting_;
      changed_.wait(lock);
      --waiting_;
    }
  }
  if (!thread_.joinable()) return;
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();  // the last reference to a group was dropped by one of its own callbacks
  } else {
    thread.join();
  }
}

void CallQueue::forget_thread() {
  if (thread_.joinable()) thread_.detach();
}

}  // namespace opensmd
