// All of a group's waits for messages of torch's Gloo, so that they can be ended.
//
// Usually they end when their connection closes. But Gloo then forgets half-sent messages: one that its own thread
// begins to send, or of which only a part has come. A wait for such a message hears nothing until its timeout.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <list>
#include <mutex>

namespace opensmd {

class Waits {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Until the message from or to a member has come or left. Throws if it does not in time, or its connection is closed.
  void wait(const WorkPtr& work, int member, std::chrono::milliseconds timeout);

  // Ends all waits; later ones succeed only for messages that are already complete. Any thread.
  void end();
  // Likewise, only for members for which `is_lost` holds.
  void end_where(const std::function<bool(int member)>& is_lost);
  // Likewise, for one message that is no longer wanted. Its connection stays as it is.
  void forget(const WorkPtr& work);

 private:
  struct InFlight {
    WorkPtr work;
    int member;
    bool forgotten = false;
  };
  class Entry;
  using All = std::list<InFlight>;

  std::mutex mutex_;
  bool ended_ = false;
  All in_flight_;
};

}  // namespace opensmd
