#include "torch/work.hpp"

#include <ATen/ATen.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <thread>
#include <utility>

#include "core/timeline/event_log.hpp"
#include "torch/tensors.hpp"

namespace opensmd {
namespace {

std::atomic<int> forks{0};

c10::intrusive_ptr<c10::ivalue::Future> tensors_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

}  // namespace

void throw_as_torch(const CollectiveError& error) { C10_THROW_ERROR(DistBackendError, error.what()); }

// ---------------------------------------------------------------- forks

MakingProcess::MakingProcess() : forks_(forks) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  TORCH_INTERNAL_ASSERT(registered == 0);
}

bool MakingProcess::is_forked() const { return forks_ != forks; }

void MakingProcess::require_not_forked() const {
  TORCH_CHECK(!is_forked(),
              "smddp: this process is a fork of the one that made the process group, and a group cannot be used on "
              "both sides of a fork, nor destroyed or aborted in the child. Start ranks with spawn, or call "
              "init_process_group after the fork.");
}

// ---------------------------------------------------------------- collectives

QueuedWork::QueuedWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
                       at::TensorList inputs, uint64_t sequence, std::shared_ptr<CallQueue> queue)
    : Work(rank, type),
      outputs_(std::move(outputs)),
      profiled_(title, inputs),
      sequence_(sequence),
      queue_(std::move(queue)),
      call_(std::make_shared<CallQueue::Call>()),
      future_(tensors_future()) {}

void QueuedWork::post(const c10::intrusive_ptr<QueuedWork>& self, std::function<void()> run) {
  auto* work = self.get();
  work->call_->run = std::move(run);
  work->call_->finished = [self](std::exception_ptr error) { self->complete(std::move(error)); };
  work->queue_->post(work->call_);
}

c10::intrusive_ptr<c10::ivalue::Future> QueuedWork::getFuture() {
  queue_->expect_callbacks(*call_);
  return future_;
}

void QueuedWork::complete(std::exception_ptr error) {
  profiled_.end();
  finish(error);
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

bool QueuedWork::wait(std::chrono::milliseconds timeout) {
  if (!isCompleted()) process_.require_not_forked();
  // With its own deadline the caller may not run calls that take longer.
  if (timeout != kNoTimeout) return Work::wait(timeout);
  if (!isCompleted()) queue_->help_until_done(*call_);  // a callback of this call may wait for it
  if (auto error = exception()) std::rethrow_exception(error);
  return true;
}

// ---------------------------------------------------------------- messages

void Unclaimed::keep(std::shared_ptr<Request> request, at::Tensor memory) {
  if (getpid() != owner_) return;  // nothing moves in a forked child
  {
    std::lock_guard lock(mutex_);
    kept_.push_back({std::move(request), std::move(memory)});
  }
  try {
    forget_done();
  } catch (const std::exception&) {
    // The group has failed, as its next call will report: this runs where a handle is dropped.
  }
}

void Unclaimed::forget_done() {
  std::vector<Kept> done;  // freed outside the lock: Python may own the memory
  std::lock_guard lock(mutex_);
  const auto first = std::stable_partition(kept_.begin(), kept_.end(), [](Kept& each) { return !each.request->done(); });
  std::move(first, kept_.end(), std::back_inserter(done));
  kept_.erase(first, kept_.end());
}

MessageWork::MessageWork(int rank, c10d::OpType type, const char* title, at::Tensor tensor, at::Tensor flat,
                         uint64_t sequence, std::shared_ptr<Request> request, std::shared_ptr<Unclaimed> unclaimed,
                         std::chrono::milliseconds timeout)
    : Work(rank, type),
      tensor_(std::move(tensor)),
      flat_(std::move(flat)),
      profiled_(title, tensor_),
      sequence_(sequence),
      unclaimed_(std::move(unclaimed)),
      request_(std::move(request)),
      timeout_(timeout) {}

MessageWork::~MessageWork() {
  if (!settled_ && event_) {  // no one waited for it, so its end is not known
    event_->end_ns = event_->start_ns;
    EventLog::of_process().add(*event_);
  }
  if (!settled_ && unclaimed_ && !request_->ends_with_handle()) unclaimed_->keep(std::move(request_), std::move(flat_));
}

bool MessageWork::isCompleted() {
  if (settled_) return true;
  process_.require_not_forked();
  bool over = false;
  with_torch_errors([&] { over = request_->done() || request_->in_vain(); });
  if (!over) return false;
  try {
    settle(timeout_);
  } catch (...) {
    // Kept in the work: exception() and wait() report it.
  }
  return true;
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  settle(timeout == kNoTimeout ? timeout_ : timeout);
  return true;
}

// Waits for the request and makes its outcome this work's, once.
void MessageWork::settle(std::chrono::milliseconds timeout) {
  std::lock_guard lock(settling_);
  if (!settled_) {
    process_.require_not_forked();
    std::exception_ptr error;
    try {
      with_torch_errors([&] { request_->wait(timeout); });
      note_end();
      if (opType_ != c10d::OpType::SEND && !flat_.is_same(tensor_)) write_back(tensor_, flat_);
    } catch (...) {
      error = std::current_exception();
    }
    profiled_.end();
    finish(error);
    settled_ = true;
  }
  if (auto error = exception()) std::rethrow_exception(error);
}

void MessageWork::note_end() {
  if (!event_) return;
  if (opType_ == c10d::OpType::RECVANYSOURCE) event_->peer = request_->source();
  EventLog::of_process().end(*event_);
}

int MessageWork::sourceRank() const {
  TORCH_CHECK(settled_, "smddp: the sender of a receive is known only after it completed; call wait() first");
  return request_->source();
}

// Rarely used, so a separate thread completes it: otherwise nothing would until someone waits.
c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  std::lock_guard lock(mutex_);
  if (future_) return future_;
  future_ = tensors_future();
  auto self = c10::intrusive_ptr<MessageWork>::unsafe_reclaim_from_nonowning(this);
  std::thread([self, future = future_] {
    try {
      self->wait(kNoTimeout);
      future->markCompleted(c10::IValue(std::vector<at::Tensor>{self->tensor_}));
    } catch (...) {
      future->setError(std::current_exception());
    }
  }).detach();
  return future_;
}

// ---------------------------------------------------------------- lists

WorkList::WorkList(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

bool WorkList::isCompleted() {
  for (auto& work : works_) {
    if (!work->isCompleted()) return false;
  }
  return true;
}

bool WorkList::isSuccess() const {
  for (const auto& work : works_) {
    if (!work->isSuccess()) return false;
  }
  return true;
}

bool WorkList::wait(std::chrono::milliseconds timeout) {
  for (auto& work : works_) work->wait(timeout);
  return true;
}

std::vector<at::Tensor> WorkList::result() {
  std::vector<at::Tensor> all;
  for (auto& work : works_) {
    auto each = work->result();
    all.insert(all.end(), each.begin(), each.end());
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkList::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(c10::AnyType::get()));
  for (auto& work : works_) futures.push_back(work->getFuture());
  return c10::collectAll(futures);
}

}  // namespace opensmd
