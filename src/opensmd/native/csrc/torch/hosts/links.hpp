// Small frames between the hosts' first members, in order for each pair and direction.
//
// They bypass Gloo's collectives, which end the process if members disagree about sizes: each frame is received into as
// much memory as any may take. Gloo sends only to a receiver that has said it waits, so receives of the next frames are
// posted long before these are sent: a frame then costs one trip over the wire, not a round trip, and a member that
// only sends may be some calls ahead.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "torch/hosts/wire.hpp"

namespace opensmd {

class Links {
 public:
  // `members`: those that exchange frames, of up to `most` bytes each.
  Links(Wire& wire, std::vector<int> members, size_t most);

  int size() const { return static_cast<int>(members_.size()); }
  int own() const { return own_; }
  const std::string& name(int index) const { return wire_.name(members_[static_cast<size_t>(index)]); }

  // 1. Where to write the next frame for the member at this index, even if it is this one.
  std::byte* outgoing(int index) { return row(outgoing_, index); }
  // 2. Sends this many bytes of it. Returns at once.
  void post(int index, size_t bytes);
  // 3. Waits until a frame has come from each of these, and everything posted has left. Throws TimedOut or PeerLost,
  // naming the members that this failed with.
  void wait(const std::vector<int>& from, milliseconds timeout);
  // The last frame from the member at this index, of which only what it sent is valid; until the next wait() for it.
  const std::byte* frame(int index) {
    return index == own_ ? outgoing(own_) : row(incoming_[slot(taken_[static_cast<size_t>(index)])], index);
  }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Clock = std::chrono::steady_clock;

  // One that is being read, and as many as may arrive meanwhile.
  static constexpr size_t kFrames = 4;

  struct Outcome {
    std::vector<std::string> missing;
    bool timed_out = false;
  };

  static size_t slot(size_t frame) { return frame % kFrames; }
  std::byte* row(at::Tensor& rows, int index) const;
  void expect_until(int index, size_t frame);
  void await(const WorkPtr& work, int index, Clock::time_point deadline, Outcome& outcome) const;

  Wire& wire_;
  const std::vector<int> members_;
  int own_ = 0;
  at::Tensor outgoing_;  // one row per member
  std::array<at::Tensor, kFrames> incoming_;
  std::array<std::vector<WorkPtr>, kFrames> receives_;  // null: the connection was closed
  std::vector<size_t> expected_, taken_;  // frames of each member; the first is 1
  std::vector<std::pair<WorkPtr, int>> sends_;
};

}  // namespace opensmd
