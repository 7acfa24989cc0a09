// Messages of collectives between members connected by torch's Gloo.
//
// Gloo sends data only to a receiver that has said it waits, and that word queues behind whatever leaves its host
// before it. So receives are posted as soon as their memory is free, long before they are waited for. Both sides of a
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

// Two members have kWays connections over each network interface, and a message's tag says which one it takes
// (_torch_internals.gloo_group). Gloo locks a connection while a thread sends; data that arrives on it waits, and the
// thread that would read it spins. Short messages leave at once, so one connection, whose thread is awake, is quicker.
constexpr int kWays = 2;
constexpr int kMostConnections = 64;
constexpr size_t kShort = 64 << 10;
constexpr int way(int from, int to, size_t bytes) { return bytes < kShort || from < to ? 0 : 1; }

// Tags of frames (links.hpp), which are short, and tags that no message ever has, one per connection. Collectives use
// tags from kFirstCallTag on (Crossing).
constexpr int kFrameTag = 0x7ffffffe;
constexpr int kNobodysTag = kFrameTag - kMostConnections;
constexpr int kFirstCallTag = 0x40000000;
// Programs use tags below this. A small one becomes one of several tags on the wire, by a few bits of the message's
// size and dtype: Gloo ends a process that receives more than it expects, and takes numbers of one dtype for another's.
constexpr int kTagLimit = 0x20000000;
// The last of them belong to the pipeline's messages (modelparallel/runtime/messages/hosts_transport.py), which are
// received ahead of need: a missing one is no failure until it is wanted.
constexpr int kFirstQuietTag = kTagLimit - 2;
bool says_kind(int64_t tag);
int tag_on_wire(int64_t tag, size_t bytes, DType dtype);

// A view of memory as torch's Gloo takes it.
at::Tensor bytes_at(const void* data, size_t bytes);

class Wire {
 public:
  using WorkPtr = Waits::WorkPtr;

  // `names[i]` is what errors call member i of `gloo`, which has `connections` to each member.
  Wire(c10::intrusive_ptr<c10d::Backend> gloo, int connections, std::vector<std::string> names)
      : gloo_(std::move(gloo)), connections_(connections), names_(std::move(names)) {}

  int rank() const { return gloo_->getRank(); }
  int size() const { return gloo_->getSize(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::string& name(int member) const { return names_[static_cast<size_t>(member)]; }

  // Messages of `gloo`, unseen by profilers. `member`: or kAnySource.
  WorkPtr send(at::Tensor data, int member, int tag) const;
  WorkPtr receive(at::Tensor into, int member, int tag) const;
  // Until a message of `gloo` from or to a member has come or left. Throws if it does not in time, or its connection is
  // closed.
  void wait(const WorkPtr& message, int member, milliseconds timeout) {
    waits_.wait(message, member, timeout);
  }
  // Any thread. Ends the wait for a message that is no longer wanted.
  void forget(const WorkPtr& message) { waits_.forget(message); }
  // Any thread. Whether a connection to a member is closed.
  bool is_lost(int member) const;
  // Any thread. Ends the waits that Gloo forgets when connections close.
  void end_lost_waits();
  // Any thread. Closes all connections. Gloo then throws in all its calls, on the other members too.
  void close();

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int connections_;
  const std::vector<std::string> names_;
  Waits waits_;
};

// Within one collective and stream, messages of a pair with the same size keep their order.
enum class Stream : int { Inputs = 0, Results = 1 };

// The messages of one collective between hosts. Their memory must outlive this, or live until they are known to be
// done.
//
// Tags follow from all calls so far and from message sizes, so that messages may leave before calls are compared: no
// member takes them for another call's.
class Crossing {
 public:
  // `digest`: of the calls (agreement.hpp). The call's timeout starts now.
  Crossing(Wire& wire, const Call& call, uint64_t digest);

  // Both return at once, with a number to wait for. Empty messages are not sent.
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
