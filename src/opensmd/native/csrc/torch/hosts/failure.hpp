// Why a group that spans hosts has failed: what its first member said, on all members.
//
// Members post failures in the group's store before they close their connections, and the first one counts. So
// connections that close without a report are those of a member that died, not of a neighbour that lost it.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <exception>
#include <mutex>
#include <string>
#include <vector>

namespace opensmd {

class Failure {
 public:
  // `gloo` connects the members, `names` are for messages. `store` is this group's alone.
  Failure(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
          std::vector<std::string> names);

  const std::string& name(int member) const { return names_[static_cast<size_t>(member)]; }

  // Notes that a call of this member, `where`, failed. Returns what counts: the first cause that is known here.
  std::string note(const std::string& where, const std::exception& error);
  // Likewise of a message. The group goes on where its connections do: only they are what others see.
  std::string note_message(const std::string& where, const std::exception& error);
  void note(const std::string& cause);  // without a report
  bool noted() const;
  void require_none() const;  // throws Aborted with what counts

 private:
  std::vector<std::string> closed() const;
  std::string await_report() const;
  std::string report(const std::string& text) const;

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::vector<std::string> names_;
  mutable std::mutex mutex_;
  std::string counts_;  // empty: none
};

}  // namespace opensmd
