// Handles of asynchronous operations. Sync operations have none: as with NCCL, they return a null Work.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/group.hpp"
#include "core/timeline/event_ring.hpp"
#include "torch/queue.hpp"
#include "torch/timeline/profiled.hpp"

namespace opensmd {

// The process that made an object. A forked child has none of its threads and must not act in its name.
class MakingProcess {
 public:
  MakingProcess();
  bool is_forked() const;  // this process is a child of it
  void require_not_forked() const;

 private:
  const int forks_;  // the count at that time
};

// A collective in the queue of its group.
class QueuedWork : public c10d::Work {
 public:
  QueuedWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs, at::TensorList inputs,
             uint64_t sequence, std::shared_ptr<CallQueue> queue);

  // Queues `run`; `self` must be this work.
  static void post(const c10::intrusive_ptr<QueuedWork>& self, std::function<void()> run);

  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void complete(std::exception_ptr error);

  std::vector<at::Tensor> outputs_;
  Profiled profiled_;
  const uint64_t sequence_;
  const MakingProcess process_;
  std::shared_ptr<CallQueue> queue_;
  std::shared_ptr<CallQueue::Call> call_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Sends and receives whose handles were dropped before they were done: the core still uses their memory.
class Unclaimed {
 public:
  explicit Unclaimed(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  void keep(std::shared_ptr<Request> request, at::Tensor memory);
  void forget_done();

 private:
  struct Kept {
    std::shared_ptr<Request> request;
    at::Tensor memory;
  };

  const std::shared_ptr<Group> group_;  // requests refer to it
  const pid_t owner_ = getpid();
  std::mutex mutex_;
  std::vector<Kept> kept_;
};

// A send or receive. Its memory is the tensor's, or a copy's if the tensor is not contiguous.
class MessageWork : public c10d::Work {
 public:
  // `unclaimed` may be null: then a request ends with its handle.
  MessageWork(int rank, c10d::OpType type, const char* title, at::Tensor tensor, at::Tensor flat, uint64_t sequence,
              std::shared_ptr<Request> request, std::shared_ptr<Unclaimed> unclaimed,
              std::chrono::milliseconds timeout);
  ~MessageWork() override;

  // For the timeline: note this message, which nothing else does, under this event.
  void record_as(const Event& event) { event_ = event; }

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return {tensor_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void settle(std::chrono::milliseconds timeout);
  void note_end();

  at::Tensor tensor_;
  at::Tensor flat_;
  Profiled profiled_;
  const uint64_t sequence_;
  const MakingProcess process_;
  std::shared_ptr<Unclaimed> unclaimed_;  // before what refers to its group
  std::shared_ptr<Request> request_;
  const std::chrono::milliseconds timeout_;
  std::optional<Event> event_;
  std::mutex settling_;
  std::atomic<bool> settled_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several works as one: what startCoalescing() ... endCoalescing() returns.
class WorkList : public c10d::Work {
 public:
  WorkList(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// Runs `action` and turns what the core throws into torch's exceptions.
template <typename Action>
void with_torch_errors(Action&& action);

[[noreturn]] void throw_as_torch(const CollectiveError& error);

template <typename Action>
void with_torch_errors(Action&& action) {
  try {
    action();
  } catch (const CollectiveError& error) {
    throw_as_torch(error);
  } catch (const std::invalid_argument& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
}

}  // namespace opensmd
