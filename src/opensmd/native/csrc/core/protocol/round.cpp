#include "core/protocol/round.hpp"

#include <algorithm>
#include <exception>

#include "core/protocol/clock.hpp"
#include "core/protocol/futex.hpp"
#include "core/protocol/yielding.hpp"
#include "core/timeline/event_log.hpp"

namespace opensmd {

namespace {

Context& usable(Context& context, Operation operation) {
  context.check_usable(name_of(operation));
  return context;
}

}  // namespace

Round::Round(Context& context, const Signature& signature, const Call& call)
    : context_(usable(context, signature.operation)), sequence_(++context.sequence),
      entry_(context.arena.member(context.rank).entries[sequence_ & 1]), exceptions_(std::uncaught_exceptions()),
      operation_(signature.operation), bytes_(signature.count * size_of(signature.dtype)),
      timeout_ns_(context.timeout_ns(call.timeout)) {
  start_ns_ = context_.record.begin(sequence_, signature, call.text);
  context_.arena.member(context_.rank).progress.entered.store(sequence_, std::memory_order_relaxed);
  entry_.signature = signature.hash();
}

Round::~Round() {
  std::atomic<uint64_t>& blocked = context_.arena.member(context_.rank).blocked.in;
  if (blocked.load(std::memory_order_relaxed) != 0) blocked.store(0, std::memory_order_relaxed);
  if (std::uncaught_exceptions() > exceptions_) return;
  const uint64_t end_ns = context_.record.end(sequence_);
  context_.arena.member(context_.rank).progress.completed.store(sequence_, std::memory_order_release);
  if (context_.timeline_group.load(std::memory_order_relaxed) != 0) note(end_ns);
}

void Round::note(uint64_t end_ns) const {
  const uint32_t group = context_.timeline_group.load(std::memory_order_relaxed);
  EventLog::of_process().add(
      {start_ns_, end_ns, bytes_, sequence_, group, -1, static_cast<uint32_t>(operation_)});
}

void Round::post() { store_and_wake(entry_.sequence, static_cast<uint32_t>(sequence_)); }

bool Round::all_posted() const {
  for (int i = 0; i < context_.size; ++i) {
    const std::atomic<uint32_t>& posted = context_.arena.member(i).entries[sequence_ & 1].sequence;
    if (!reached(posted.load(std::memory_order_acquire), static_cast<uint32_t>(sequence_))) return false;
  }
  return true;
}

void Round::meet() {
  for (int step = 1; step < context_.size; ++step) {
    const int peer = (context_.rank + step) % context_.size;
    wait(context_.arena.member(peer).entries[sequence_ & 1].sequence, static_cast<uint32_t>(sequence_), peer);
  }
  compare_signatures();
}

void Round::compare_signatures() {
  bool equal = true;
  for (int i = 0; i < context_.size; ++i) {
    equal &= context_.arena.member(i).entries[sequence_ & 1].signature == entry_.signature;
  }
  if (equal) return;
  std::string calls;
  std::vector<std::string> described(static_cast<size_t>(context_.size));
  for (int i = 0; i < context_.size; ++i) {
    described[static_cast<size_t>(i)] = context_.describe(i, sequence_);
  }
  for (size_t i = 0; i < described.size(); ++i) {
    if (std::find(described.begin(), described.begin() + static_cast<long>(i), described[i]) !=
        described.begin() + static_cast<long>(i)) {
      continue;
    }
    std::vector<std::string> names;
    for (size_t j = i; j < described.size(); ++j) {
      if (described[j] == described[i]) names.push_back(context_.name(static_cast<int>(j)));
    }
    calls += (calls.empty() ? "" : "; ") + join_names(names) + " called " + described[i];
  }
  context_.fail(ErrorKind::Mismatch, "the members of the group made different calls at sequence number " +
                                         std::to_string(sequence_) + ": " + calls +
                                         ". All must call the same operations with the same sizes in the same order");
}

// The store and the check for sleepers must both be sequentially consistent, as on the sleeper's side: otherwise each
// could miss the other, and a wake-up would be lost.
void Round::store_and_wake(std::atomic<uint32_t>& word, uint32_t value) {
  word.store(value, std::memory_order_seq_cst);
  if (context_.arena.member(context_.rank).sleepers.value.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

bool Round::watch(const std::atomic<uint32_t>& word, uint32_t target) const {
  for (int look = 0; look < 16; ++look) {
    if (reached(word.load(std::memory_order_acquire), target)) return true;
    cpu_relax();
  }
  return false;
}

void Round::wait_slowly(const std::atomic<uint32_t>& word, uint32_t target, int owner) {
  if (context_.spin_ns > 0) {
    const uint64_t end = now_ns() + context_.spin_ns;
    do {
      if (watch(word, target)) return;
    } while (now_ns() < end);
  }
  Yielding yielding(context_.config.waiting.yields);
  while (yielding.once()) {
    if (reached(word.load(std::memory_order_acquire), target)) return;
  }
  sleep(word, target, owner);
}

void Round::sleep(const std::atomic<uint32_t>& word, uint32_t target, int owner) {
  const Sleeper sleeper(context_.arena.member(owner).sleepers.value);
  uint64_t next_look = now_ns() + kCheckInterval;
  for (;;) {
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (reached(seen, target)) return;
    const uint64_t now = now_ns();
    const uint64_t deadline = start_ns_ + timeout_ns_;
    if (now >= next_look || now >= deadline) {
      look_after_peers();
      if (now >= start_ns_ + kLongWait) say_that_nothing_else_comes();
      next_look = now + kCheckInterval;
      // Checked once more: this member may have been stopped meanwhile.
      if (now >= deadline && !reached(word.load(std::memory_order_acquire), target)) time_out();
    }
    futex_wait(word, seen, std::min(next_look, deadline > now ? deadline : next_look) - now);
  }
}

std::string Round::title() const {
  return context_.describe(context_.rank, sequence_) + " #" + std::to_string(sequence_) + " on " +
         context_.name(context_.rank);
}

void Round::fail(ErrorKind kind, const std::string& text) { context_.fail(kind, title() + ": " + text); }

// A member that died or left before completing this call can never complete it, whichever member we wait for now.
void Round::look_after_peers() {
  if (context_.aborted()) {
    const std::string cause = context_.abort_text();
    const std::string text = title() + " was given up: " + cause;
    if (context_.abort_kind() == ErrorKind::TimedOut) throw TimedOut(text, absent());
    throw_error(context_.abort_kind(), text);
  }
  for (int i = 0; i < context_.size; ++i) {
    if (i == context_.rank) continue;
    const Member& member = context_.arena.member(i);
    const bool left = member.identity.presence.load() == Presence::Left;
    if (!left && !context_.liveness.gone(i)) continue;
    if (member.progress.completed.load(std::memory_order_acquire) >= sequence_) continue;
    fail(ErrorKind::PeerLost, context_.name(i) + (left ? " has left the group while others still need it ("
                                                       : " has died (") +
                                  context_.whereabouts(i) + ")");
  }
}

// For a peer that waits for a message from this member rather than for this call; see Mailbox::warn_of_circle.
void Round::say_that_nothing_else_comes() {
  std::atomic<uint64_t>& blocked = context_.arena.member(context_.rank).blocked.in;
  if (blocked.load(std::memory_order_relaxed) != sequence_ && context_.config.alone()) blocked.store(sequence_);
}

void Round::time_out() {
  std::vector<std::string> missing;
  std::vector<std::string> inside;
  for (int i = 0; i < context_.size; ++i) {
    if (i == context_.rank) continue;
    const Progress& progress = context_.arena.member(i).progress;
    if (progress.completed.load() >= sequence_) continue;
    std::vector<std::string>& list = progress.entered.load() < sequence_ ? missing : inside;
    list.push_back(context_.name(i) + " (" + context_.whereabouts(i) + ")");
  }
  std::string text = title() + ": Timed out after " + std::to_string(timeout_ns_ / 1000000u) + " ms";
  if (!missing.empty()) text += "; not arrived: " + join_names(missing);
  if (!inside.empty()) text += "; arrived but not finished: " + join_names(inside);
  context_.abort(ErrorKind::TimedOut, text);
  throw TimedOut(text, absent());
}

std::vector<std::string> Round::absent() const {
  std::vector<std::string> names;
  for (int i = 0; i < context_.size; ++i) {
    if (context_.arena.member(i).progress.entered.load() < sequence_) names.push_back(context_.name(i));
  }
  return names;
}

}  // namespace opensmd
