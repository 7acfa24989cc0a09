// A torch handle that ends only when it is waited for, like those of Gloo's messages and reduce_scatter, with a note of
// when that was. Without a wait, only its beginning is known.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "core/timeline/event_log.hpp"

namespace opensmd {

class WaitedWork final : public c10d::Work {
 public:
  WaitedWork(c10::intrusive_ptr<c10d::Work> inner, const Event& event)
      : Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), event_(event) {}

  ~WaitedWork() override {
    std::call_once(ended_, [this] {
      event_.end_ns = event_.start_ns;
      EventLog::of_process().add(event_);
    });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    std::call_once(ended_, [this] {
      if (opType_ == c10d::OpType::RECVANYSOURCE) event_.peer = inner_->sourceRank();
      EventLog::of_process().end(event_);
    });
    return done;
  }

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  Event event_;
  std::once_flag ended_;
};

}  // namespace opensmd
