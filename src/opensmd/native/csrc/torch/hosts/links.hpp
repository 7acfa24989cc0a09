// Small frames between the first members of the hosts: every one sends one to all others and gets theirs.
//
// They go past Gloo's collectives, which end the process where members disagree about sizes: a frame is received into
// as much memory as any may take. Gloo sends only to who has said that it waits, so the receives of the next frames are
// posted before these are sent: a frame then takes one way over the wire, not a way there and back.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "torch/hosts/wire.hpp"

namespace opensmd {

class Links {
 public:
  // `members`: of `gloo`, those that exchange frames; `names`: how messages call them. Frames take up to `most` bytes.
  Links(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> members, std::vector<std::string> names, size_t most);

  int size() const { return static_cast<int>(members_.size()); }
  int own() const { return own_; }

  // 1. Where the next frame for the one of this index is to be written, also that for this member itself.
  std::byte* outgoing(int index) { return row(outgoing_, index); }
  // 2. Sends so many bytes of each. Returns at once.
  void post(const std::vector<size_t>& bytes);
  // 3. Until all frames have come. Throws TimedOut or PeerLost, naming the members whose frames have not.
  void wait(milliseconds timeout);
  // What came from the one of this index, and no more than what it has sent; until the second next post().
  const std::byte* frame(int index) { return index == own_ ? outgoing(own_) : row(incoming_[parity()], index); }

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  size_t parity() const { return posted_ % 2; }
  std::byte* row(at::Tensor& rows, int index) const;
  void expect(size_t parity);
  int other(int step) const { return (own_ + step) % size(); }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::vector<int> members_;
  const std::vector<std::string> names_;
  int own_ = 0;
  at::Tensor outgoing_;  // a row a member
  at::Tensor incoming_[2];
  std::vector<WorkPtr> receives_[2];  // in the order of other()
  std::vector<WorkPtr> sends_;
  size_t posted_ = 0;
};

}  // namespace opensmd
