// All waits of a group for messages of torch's Gloo, so that they can be ended.
//
// Closing the connections ends nearly all of them. But Gloo forgets a message that its own thread begins to send at the
// moment in which it finds the connection closed: who waits for that one hears nothing until its timeout.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <list>
#include <mutex>

namespace opensmd {

class Waits {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Until the message has come or left. Throws where it does not in time, or its connection is closed.
  void wait(const WorkPtr& work, std::chrono::milliseconds timeout);

  // Ends all waits; later ones are for messages that are through. Any thread.
  void end();

 private:
  class Entry;

  std::mutex mutex_;
  bool ended_ = false;
  std::list<WorkPtr> under_way_;
};

}  // namespace opensmd
