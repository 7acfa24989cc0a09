// One collective in progress on one member, from its entry to its end.
//
// Every collective begins the same way. A member fills its entry line (payload), stores the sequence number into it,
// waits until every peer's line shows the same number, and compares signatures:
//
//      member 0                     member 1
//      payload -> line[s & 1]       payload -> line[s & 1]
//      line.sequence = s  ───┐  ┌── line.sequence = s
//      wait for 1's line  <──┼──┘
//                            └────> wait for 0's line
//
// Two lines, by parity, are enough: to post s+2 a member must have finished s+1, for which every peer posted s+1, for
// which it finished s. The same argument covers staged data, so one-shot collectives need no closing barrier.
#pragma once

#include "core/protocol/context.hpp"

namespace opensmd {

class Round {
 public:
  Round(Context& context, const Signature& signature, const Call& call);
  ~Round();
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  std::byte* payload() { return entry_.payload; }
  void post();  // tells all: here I am, with this payload
  void meet();  // waits until all have; throws Mismatch unless all make the same call
  bool all_posted() const;  // meet() would not have to wait
  const std::byte* payload_of(int member) const { return context_.arena.member(member).entries[sequence_ & 1].payload; }
  uint64_t sequence() const { return sequence_; }

  // Publishes with release order and wakes threads that sleep on it.
  void set(Flag& flag, uint32_t value) { store_and_wake(flag.value, value); }
  void wait(const Flag& flag, uint32_t target, int owner) { wait(flag.value, target, owner); }

  // For errors found by the collectives themselves; the text gets the operation and number in front.
  [[noreturn]] void fail(ErrorKind kind, const std::string& text);

 private:
  void store_and_wake(std::atomic<uint32_t>& word, uint32_t value);
  void wait(const std::atomic<uint32_t>& word, uint32_t target, int owner) {
    if (!reached(word.load(std::memory_order_acquire), target)) wait_slowly(word, target, owner);
  }
  void wait_slowly(const std::atomic<uint32_t>& word, uint32_t target, int owner);
  bool watch(const std::atomic<uint32_t>& word, uint32_t target) const;
  void sleep(const std::atomic<uint32_t>& word, uint32_t target, int owner);
  void look_after_peers();
  void say_that_nothing_else_comes();
  void compare_signatures();
  void note(uint64_t end_ns) const;  // for the timeline
  [[noreturn]] void time_out();
  std::string title() const;
  std::vector<std::string> absent() const;  // names of the members that have not entered this call

  Context& context_;
  const uint64_t sequence_;
  Entry& entry_;
  const int exceptions_;
  const Operation operation_;
  const uint64_t bytes_;
  uint64_t start_ns_;
  uint64_t timeout_ns_;
};

}  // namespace opensmd
