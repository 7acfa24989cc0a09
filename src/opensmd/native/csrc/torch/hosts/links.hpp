// Small frames between members that torch's Gloo connects: every one sends its own to all others and gets theirs.
//
// They go past Gloo's collectives, which end the process where members disagree about sizes: a frame is received into
// as much memory as any may take.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstddef>
#include <string>
#include <vector>

#include "core/group.hpp"

namespace opensmd {

// The tag of these frames, and one that no message ever has. Programs have those below.
constexpr int kFrameTag = 0x7fffffff;
constexpr int kNobodysTag = kFrameTag - 1;

// Closes all connections of torch's Gloo, which then throws in all its calls, also on the other members. Any thread.
void close_connections(c10d::Backend& gloo);

class Links {
 public:
  // `names[i]` is how messages call member i of `gloo`.
  Links(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<std::string> names);

  int rank() const { return rank_; }
  int size() const { return size_; }

  // 1. Where the own frame of up to `most` bytes, as many as those of the others may take, is to be written.
  std::byte* prepare(size_t most);
  // 2. Sends its first `bytes`. Returns at once.
  void post(size_t bytes);
  // 3. Until all frames have come. Throws TimedOut or PeerLost, naming the members whose frames have not.
  void wait(milliseconds timeout);
  // What member i has sent (bytes it has not sent are 0 or those of earlier frames); the own frame, too. Until the
  // next prepare().
  const std::byte* frame(int member) const;

  void abort() { close_connections(*gloo_); }
  void leave() { gloo_->shutdown(); }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::vector<std::string> names_;
  const int rank_;
  const int size_;
  at::Tensor frames_;  // a row a member
  std::vector<WorkPtr> receives_;
  std::vector<WorkPtr> sends_;
};

}  // namespace opensmd
