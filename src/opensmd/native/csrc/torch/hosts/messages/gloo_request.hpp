// A program's message over the wire, as its caller holds it.
//
// Gloo completes a message only in wait(), so polling needs a thread that waits. A long wait checks now and then
// whether it is in vain: Gloo does not report every closed connection (waits.hpp), nor a peer that waits for something
// else (message_ends.hpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "core/messages/request.hpp"
#include "torch/hosts/failure.hpp"
#include "torch/hosts/messages/message_ends.hpp"
#include "torch/hosts/pauses.hpp"
#include "torch/hosts/wire.hpp"

namespace opensmd {

class GlooRequest final : public Request {
 public:
  struct Message {
    int peer;            // or kAnySource
    std::string where;  // what errors call it
    bool quiet;          // an error does not fail the group
    at::Tensor bytes;
    std::unique_ptr<const MessageEnds::End> end;  // null: not compared
  };

  // `timeout`: used where wait() is given none.
  GlooRequest(std::shared_ptr<Wire> wire, std::shared_ptr<Failure> failure, c10::intrusive_ptr<c10d::Work> work,
              milliseconds timeout, Message message);
  ~GlooRequest() override;

  bool done() override;
  bool in_vain() override;
  void wait(milliseconds timeout) override;

  int source() const override { return work_->sourceRank(); }
  size_t received_bytes() const override { return message_.bytes.nbytes(); }
  bool ends_with_handle() const override { return true; }

 private:
  using Clock = std::chrono::steady_clock;

  bool start_waiting(milliseconds timeout);  // false: a thread is waiting already
  bool is_over() const { return waiting_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  void await(milliseconds timeout, Clock::time_point deadline);
  void look();
  Clock::time_point next_look();

  const std::shared_ptr<Wire> wire_;
  const std::shared_ptr<Failure> failure_;
  const c10::intrusive_ptr<c10d::Work> work_;
  const milliseconds timeout_;
  const Message message_;
  std::mutex mutex_;
  std::shared_future<void> waiting_;
  Pauses pauses_;
  Clock::time_point next_look_;
  std::string difference_;  // from the other end; empty: none known
  bool finished_ = false;
};

}  // namespace opensmd
