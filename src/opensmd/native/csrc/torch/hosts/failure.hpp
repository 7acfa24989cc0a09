// Why a group that spans hosts has failed: all members report the cause that was posted first.
//
// Members post failures in the group's store before they close their connections, and the first report counts. So
// connections that close without a report belong to a member that died, not to a neighbour that lost it.
//
// Where calls differ, or a member has waited too long, the first report only asks all members to post their last calls.
// All compare these and report the same result. A member not in a call at that time posts nothing, and learns of the
// failure in its next call.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch/hosts/call_history.hpp"
#include "torch/hosts/wire.hpp"

namespace opensmd {

class Failure {
 public:
  // Ends the waits of this host's members, and the waits of others for them.
  using Interrupt = std::function<void(const std::string& reason)>;

  // `wire` connects the members. No other group uses `store`.
  Failure(std::shared_ptr<Wire> wire, c10::intrusive_ptr<c10d::Store> store, Interrupt interrupt);

  const std::string& name(int member) const { return wire_->name(member); }

  // For a call that has waited long. Ends its wait if another member has failed.
  void look_for_failure();
  // Also ends it, with an error as if from the call itself, if the connection to the awaited member is closed or
  // members that wait long have called different collectives.
  void look_closer();

  // Called for each collective before it begins.
  void note_call(uint64_t sequence, const Signature& signature, std::string_view text);

  // Notes that a call of this member, `where`, failed. Returns the first cause known here.
  std::string note(const std::string& where, const std::exception& error);
  // Likewise for a message with `peer`, or kAnySource. The group goes on if its connections do: others see only those.
  std::string note_message(const std::string& where, int peer, const std::exception& error);
  void end(const std::string& cause);  // reports it, unless a cause is known already, and interrupts
  bool noted() const;
  void require_none() const;  // throws Aborted with the known cause

 private:
  // What a timed-out call waited for: all members, or one of them.
  struct Wait {
    bool late = false;
    int peer = kAnySource;
  };

  std::string note(const std::string& where, const std::exception& error, Wait wait);
  void note(const std::string& cause);  // without a report
  std::vector<std::string> closed() const;  // in order
  std::string death(const std::vector<std::string>& lost) const;
  bool store_answers() const;
  std::string await(const std::string& key, std::chrono::milliseconds time) const;
  std::string report(const std::string& key, const std::string& text) const;
  void part(const std::vector<std::string>& lost) const;
  std::string compared_calls(const std::string& known, std::chrono::milliseconds time, int peer) const;
  std::vector<std::string> keys_of(const char* prefix) const;  // one for each member
  std::string own_calls() const;

  const std::shared_ptr<Wire> wire_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const Interrupt interrupt_;
  mutable std::mutex mutex_;
  CallHistory calls_;
  std::string counts_;  // the known cause; empty: none
};

}  // namespace opensmd
