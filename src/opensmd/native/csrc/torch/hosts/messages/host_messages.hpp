// send and recv in a group that spans hosts: in shared memory between members of one host, over the wire otherwise.
//
// A receive from any source must hear both, and Gloo's cannot be withdrawn. So a member that first posts one closes its
// inbox in shared memory (core/messages/inbox.cpp): from then on its messages come over the wire, even those of its own
// host, and receives that wait in shared memory move there.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "torch/hosts/layout.hpp"
#include "torch/hosts/local.hpp"

namespace opensmd {

// A message that may go in shared memory, with all that posting it on the wire needs.
struct Posting {
  bool sends;
  at::Tensor tensor;
  int peer;  // or kAnySource
  int64_t tag;
  DType dtype;
};

class HostMessages {
 public:
  using OnWire = std::function<std::shared_ptr<Request>(const Posting&)>;
  // Turns a shared-memory error into the group's, if it is one, and throws it. Also called after the group has ended.
  using Fail = std::function<void(const Posting&, const std::exception&)>;

  HostMessages(std::shared_ptr<Group> group, const Layout& layout, OnWire send, OnWire receive, Fail fail);
  ~HostMessages();

  std::shared_ptr<Request> post_send(const Posting& posting);
  std::shared_ptr<Request> post_receive(const Posting& posting);

 private:
  class Sharing;
  struct Receives;

  bool here(int member) const { return layout_.host_of(member) == layout_.host(); }
  int place_of(int peer) const { return peer == kAnySource ? kAnySource : layout_.place_of(peer); }
  std::shared_ptr<Request> arrived(const Posting& posting);
  void receive_on_wire();

  const std::shared_ptr<Group> group_;
  const Layout& layout_;
  const OnWire send_;
  const OnWire receive_;
  const Fail fail_;
  const std::shared_ptr<Receives> receives_;
};

}  // namespace opensmd
