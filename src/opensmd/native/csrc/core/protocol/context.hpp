// What all collectives of one group share on one member: the arena, running counters, and how the group fails.
#pragma once

#include <vector>

#include "core/memory/arena.hpp"
#include "core/memory/heap.hpp"
#include "core/memory/stage.hpp"
#include "core/protocol/fork_guard.hpp"
#include "core/protocol/liveness.hpp"
#include "core/protocol/record.hpp"

namespace opensmd {

struct Context {
  explicit Context(GroupConfig given);

  const std::string& name(int member) const { return config.names[static_cast<size_t>(member)]; }
  uint64_t timeout_ns(milliseconds asked) const;

  // The first cause wins and stays; every waiting member sees it within kCheckInterval.
  void abort(ErrorKind kind, const std::string& text);
  bool aborted() const { return arena.header().abort_state.load(std::memory_order_acquire) != 0; }
  ErrorKind abort_kind() const;
  std::string abort_text() const;
  [[noreturn]] void fail(ErrorKind kind, const std::string& text);  // abort and throw
  void check_usable(const char* what) const;                        // throws Aborted, or for a forked child

  std::string describe(int member, uint64_t sequence) const;  // a member's collective, for messages
  // "has not arrived (its process is stopped; last in broadcast(...) #6)"
  std::string whereabouts(int member) const;

  GroupConfig config;
  int rank;
  int size;
  std::atomic<milliseconds> timeout;  // for calls that give none
  ForkGuard fork_guard;
  Arena arena;
  Liveness liveness;
  Record record;
  Heap heap;
  Stage stage;
  int cores;  // that the members share
  unsigned spin_ns;

  // Counters that continue from call to call and are the same on every member.
  uint64_t sequence = 0;
  uint32_t steps = 0;     // pipeline steps of all earlier calls
  uint32_t finishes = 0;  // zero-copy calls so far
  std::atomic<bool> left{false};
  std::atomic<uint32_t> timeline_group{0};  // number in the EventLog; 0: none is wanted
};

constexpr uint64_t kLongWait = 300u * 1000 * 1000;  // ns after which a wait may last forever
constexpr uint64_t kCheckInterval = 50u * 1000 * 1000;  // ns between checks on the peers while asleep

// "rank 0, rank 1 and rank 5"
std::string join_names(const std::vector<std::string>& names);

}  // namespace opensmd
