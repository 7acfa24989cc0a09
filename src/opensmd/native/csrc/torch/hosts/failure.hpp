// Why a group that spans hosts has failed: what its first member said, on all members.
//
// Members post failures in the group's store before they close their connections, and the first one counts. So
// connections that close without a report are those of a member that died, not of a neighbour that lost it.
//
// Where calls differ, or one has waited too long, the first report says only that all are to post their last calls. All
// compare these and say the same of them. One that is not in a call at that time has not told the others, and learns of it
// in its next.
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
  // Ends what members of this host wait for, and what others wait for from them.
  using Interrupt = std::function<void(const std::string& reason)>;

  // `wire` connects the members. `store` is this group's alone.
  Failure(std::shared_ptr<Wire> wire, c10::intrusive_ptr<c10d::Store> store, Interrupt interrupt);

  const std::string& name(int member) const { return wire_->name(member); }

  // While a call waits for long. What it waits for ends where another member has failed,
  void look_for_failure();
  // or where the connection to the member that it waits for is closed, or members that wait for long have called different
  // collectives: as if one had found that in its call.
  void look_closer();

  // Each collective, before it begins.
  void note_call(uint64_t sequence, const Signature& signature, std::string_view text);

  // Notes that a call of this member, `where`, failed. Returns what counts: the first cause that is known here.
  std::string note(const std::string& where, const std::exception& error);
  // Likewise of a message with `peer`, or kAnySource. The group goes on where its connections do: only they are what
  // others see.
  std::string note_message(const std::string& where, int peer, const std::exception& error);
  void end(const std::string& cause);  // reports it, unless something counts already, and interrupts
  bool noted() const;
  void require_none() const;  // throws Aborted with what counts

 private:
  // For whom a call that has timed out waited: all members, or one of them.
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
  std::string counts_;  // empty: none
};

}  // namespace opensmd
