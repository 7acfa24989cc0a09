// Messages of collectives between members that torch's Gloo connects.
//
// Gloo sends data only to who has said that it waits for them, and that word waits behind whatever leaves the host
// before it. So receives are posted as early as their memory is free, long before they are waited for. Both sides of a
// pair post in the same order; memory is read and written directly.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/group.hpp"
#include "torch/hosts/waits.hpp"

namespace opensmd {

// Two members have as many connections as ways over each network interface, and a message's tag says which it takes
// (_torch_internals.gloo_group). Gloo locks a connection while a thread sends; what comes over it then waits, and the
// thread that would read it spins. What is short leaves at once: for that, one connection, whose thread is awake, is
// quicker.
constexpr int kWays = 2;
constexpr int kMostConnections = 64;
constexpr size_t kShort = 64 << 10;
constexpr int way(int from, int to, size_t bytes) { return bytes < kShort || from < to ? 0 : 1; }

// Tags of frames (links.hpp), which are short, and those that no message ever has, one a connection. Collectives have
// those from kFirstCallTag on (Crossing).
constexpr int kFrameTag = 0x7ffffffe;
constexpr int kNobodysTag = kFrameTag - kMostConnections;
constexpr int kFirstCallTag = 0x40000000;
// Programs have tags below this. For small ones there are as many tags on the wire as a few bits of a message's size and
// dtype say: Gloo ends the process that receives more than it expects, and takes numbers of one dtype for another's.
constexpr int kTagLimit = 0x20000000;
// The last of them are those of the pipeline's messages (modelparallel/runtime/messages/hosts_transport.py), which are
// received ahead of need: that one does not come is no failure before somebody wants it.
constexpr int kFirstQuietTag = kTagLimit - 2;
bool says_kind(int64_t tag);
int tag_on_wire(int64_t tag, size_t bytes, DType dtype);

// A view of memory as torch's Gloo takes it.
at::Tensor bytes_at(const void* data, size_t bytes);

class Wire {
 public:
  // `names[i]` is how messages call member i of `gloo`, which has so many connections to each.
  Wire(c10::intrusive_ptr<c10d::Backend> gloo, int connections, std::vector<std::string> names)
      : gloo_(std::move(gloo)), connections_(connections), names_(std::move(names)) {}

  c10d::Backend& gloo() { return *gloo_; }
  int rank() const { return gloo_->getRank(); }
  int size() const { return gloo_->getSize(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::string& name(int member) const { return names_[static_cast<size_t>(member)]; }

  // Until a message of `gloo` from or to a member has come or left. Throws where it does not in time, or its connection is
  // closed.
  void wait(const c10::intrusive_ptr<c10d::Work>& message, int member, milliseconds timeout) {
    waits_.wait(message, member, timeout);
  }
  // Any thread. Ends the wait for a message that nobody wants any more.
  void forget(const c10::intrusive_ptr<c10d::Work>& message) { waits_.forget(message); }
  // Any thread. Whether a connection to a member is closed,
  bool is_lost(int member) const;
  // to end the waits that Gloo has forgotten then,
  void end_lost_waits();
  // and to close all. Gloo then throws in all its calls, also on the other members.
  void close();

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int connections_;
  const std::vector<std::string> names_;
  Waits waits_;
};

// Within one collective, messages of a pair that have one size keep their order in each of these.
enum class Stream : int { Inputs = 0, Results = 1 };

// The messages of one collective that cross between hosts. Their memory must live as long as this, or until they are known to be done.
//
// Their tags follow from all calls so far and from their sizes, so that they may leave before those are compared: nobody
// takes them for messages of another call.
class Crossing {
 public:
  // `digest`: of the calls (agreement.hpp). The call's timeout counts from now.
  Crossing(Wire& wire, const Call& call, uint64_t digest);

  // Both return at once, with a number to wait for. Empty messages do not travel.
  size_t receive(void* data, size_t bytes, int member, Stream stream = Stream::Inputs);
  size_t send(const void* data, size_t bytes, int member, Stream stream = Stream::Inputs);

  // Throw TimedOut or PeerLost, naming the other member.
  void await_received(size_t receive) { await(receives_[receive], "not arrived: "); }
  void await_sent(size_t send) { await(sends_[send], "nothing taken by: "); }
  void await_all_sent();

 private:
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;  // null when done
    int member;
  };

  void await(Message& message, const char* missing);
  int tag_of(Stream stream, size_t bytes, int from, int to) const;

  Wire& wire_;
  const uint64_t digest_;
  const milliseconds timeout_;
  const std::chrono::steady_clock::time_point deadline_;
  std::vector<Message> receives_;
  std::vector<Message> sends_;
};

}  // namespace opensmd
