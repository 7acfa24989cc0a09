// How callers wait for messages: they make progress themselves, check on their peers, and give up at the timeout.
#include <algorithm>
#include <cassert>

#include "core/messages/mailbox.hpp"
#include "core/protocol/clock.hpp"
#include "core/protocol/futex.hpp"
#include "core/protocol/yielding.hpp"

namespace opensmd {

void Mailbox::wait(Message& message, milliseconds timeout) {
  if (message.complete()) return;
  const Message* const one[1] = {&message};
  wait_for_any(one, 1, timeout);
}

size_t Mailbox::wait_for_any(const Message* const* messages, size_t count, milliseconds timeout) {
  const auto find = [&] {
    const auto found = std::find_if(messages, messages + count, [](const Message* m) { return m->complete(); });
    return found == messages + count ? kNotYet : static_cast<size_t>(found - messages);
  };
  const auto expected = [&] {
    std::vector<Expectation> all;
    for (size_t i = 0; i < count; ++i) all.push_back({messages[i]->kind, messages[i]->peer, title(*messages[i])});
    return all;
  };
  return wait_until(find, expected, timeout);
}

size_t Mailbox::wait_ready(const std::vector<std::pair<int, int64_t>>& wanted, milliseconds timeout) {
  context_.fork_guard.check();
  const auto find = [&] {
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (find_ready(wanted[i].first, wanted[i].second, nullptr, nullptr)) return i;
    }
    return kNotYet;
  };
  if (context_.aborted()) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (arrived_before_failure(wanted[i].first, wanted[i].second)) return i;
    }
  }
  context_.check_usable("wait_ready");
  const auto expected = [&] {
    std::vector<Expectation> all;
    for (const auto& [source, tag] : wanted) {
      const std::string from = source == kAnySource ? "any rank" : context_.name(source);
      all.push_back({Message::Kind::Receive, source,
                     "wait_ready(from " + from + ", tag=" + std::to_string(tag) + ") on " + context_.name(context_.rank)});
    }
    return all;
  };
  return wait_until(find, expected, timeout);
}

size_t Mailbox::look(const Find& find, bool drain, bool* moved) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t found = find();
  if (found != kNotYet) return found;
  *moved = advance(drain);
  return find();
}

// `find` is called with the lock held; `expected` only in trouble.
size_t Mailbox::wait_until(const Find& find, const Expected& expected, milliseconds timeout) {
  context_.fork_guard.check();
  struct Waiting {
    explicit Waiting(Mailbox& mailbox) : mailbox(mailbox) { ++mailbox.waiting_; }
    ~Waiting() { mailbox.end_waiting(); }
    Mailbox& mailbox;
  } waiting(*this);
  bool moved = false;
  size_t found = look(find, false, &moved);
  if (found != kNotYet) return found;
  const uint64_t start = now_ns();
  while (now_ns() < start + context_.spin_ns) {
    if ((found = look(find, false, &moved)) != kNotYet) return found;
    cpu_relax();
  }
  const uint64_t deadline = start + context_.timeout_ns(timeout);
  const auto check = [&](uint64_t now) {
    for (const Expectation& expectation : expected()) {
      look_after_peers(expectation, find);
      if (now >= start + 2 * kLongWait) warn_of_circle(expectation, find, now - start, deadline - start);
    }
    // What arrived since this rank last looked, perhaps long ago if it was stopped, still counts.
    if (now >= deadline && look(find, true, &moved) == kNotYet) time_out(expected(), now - start);
  };
  uint64_t next_look = start + kCheckInterval;
  Yielding yielding(context_.config.waiting.yields);
  while (yielding.once()) {
    if ((found = look(find, false, &moved)) != kNotYet) return found;
    if (moved) yielding.restart();
    if (yielding.now() < next_look) continue;
    check(yielding.now());
    next_look = yielding.now() + kCheckInterval;
  }
  for (;;) {
    if ((found = sleep_until(find, std::min(deadline, now_ns() + kCheckInterval))) != kNotYet) return found;
    check(now_ns());
  }
}

// The helper thread may have gone to sleep in a long wait that made progress itself: what is still in progress, such as
// a send to a slow receiver, is its job again.
void Mailbox::end_waiting() {
  if (--waiting_ == 0 && in_flight_.load() > 0) progress_thread_.notice();
}

// Sleeps until something moves in this member's rings, or until it is time to check on the peers.
size_t Mailbox::sleep_until(const Find& find, uint64_t until) {
  Doorbell& doorbell = context_.arena.member(context_.rank).doorbell;
  const Sleeper sleeper(doorbell.sleepers);
  for (;;) {
    const uint32_t heard = doorbell.rings.load(std::memory_order_seq_cst);
    // Others may be waiting for room in a ring full of messages that were not asked for: drain it.
    bool moved = false;
    const size_t found = look(find, true, &moved);
    const uint64_t now = now_ns();
    if (found != kNotYet || now >= until) return found;
    futex_wait(doorbell.rings, heard, until - now);
  }
}

void Mailbox::look_after_peers(const Expectation& expectation, const Find& find) {
  if (context_.aborted()) {
    const std::string cause = context_.abort_text();
    give_up(context_.abort_kind(), expectation.title + " was given up: " + cause);
  }
  const int lost = lost_peer(expectation.peer);
  if (lost < 0) return;
  bool moved = false;  // what it sent before it ended still counts
  if (look(find, true, &moved) != kNotYet) return;
  give_up(ErrorKind::PeerLost, expectation.title + ": " + context_.name(lost) +
                                   (has_left(lost) ? " has left the group while others still need it (" : " has died (") +
                                   context_.whereabouts(lost) + ")");
}

bool Mailbox::has_left(int member) const {
  return context_.arena.member(member).identity.presence.load() == Presence::Left;
}

// The member whose end leaves nothing to expect from `expected`, or -1.
int Mailbox::lost_peer(int expected) const {
  int missing = 0;
  for (int i = 0; i < context_.size; ++i) {
    if (i == context_.rank || (expected != kAnySource && expected != i)) continue;
    const bool left = has_left(i);
    if (!left && !context_.liveness.gone(i)) continue;
    // From any source: another member may still send, unless all have left.
    if (left && expected == kAnySource && ++missing < context_.size - 1) continue;
    return i;
  }
  return -1;
}

bool Mailbox::in_vain(Message& message) {
  const uint64_t now = now_ns();
  if (now < message.next_look_ns.load(std::memory_order_relaxed)) return false;
  message.next_look_ns.store(now + kCheckInterval, std::memory_order_relaxed);
  return !message.complete() && (context_.aborted() || lost_peer(message.peer) >= 0);
}

// A message on one side and a collective on the other: each waits for the other's next call. Both have only the threads
// that wait; still this is no error, because callbacks of other groups' calls could make further calls from threads
// that are not Python's.
void Mailbox::warn_of_circle(const Expectation& expectation, const Find& find, uint64_t waited_ns,
                             uint64_t timeout_ns) {
  if (expectation.peer == kAnySource || warned_of_circle_) return;
  const uint64_t theirs = context_.arena.member(expectation.peer).blocked.in.load();
  const Progress& own = context_.arena.member(context_.rank).progress;
  const uint64_t entered = own.entered.load();
  if (theirs <= entered || own.completed.load() != entered || !context_.config.alone()) return;
  bool moved = false;  // what it sent before that call; this rank may have slept since it last looked
  if (look(find, true, &moved) != kNotYet) return;
  if (warned_of_circle_.exchange(true)) return;
  const std::string& peer = context_.name(expectation.peer);
  context_.config.warn(expectation.title + " has waited for " + std::to_string(waited_ns / 1000000u) + " ms, while " +
                       peer + " waits in " +
                       Record(context_.arena, expectation.peer, Record::Collectives).at(theirs).describe() + " #" +
                       std::to_string(theirs) + " until " + context_.name(context_.rank) +
                       " calls that, too. Both wait until the timeout of " + std::to_string(timeout_ns / 1000000u) +
                       " ms: call collectives on all ranks, and send and receive in pairs before or after them");
}

void Mailbox::time_out(const std::vector<Expectation>& expected, uint64_t waited_ns) {
  std::string text;
  for (const Expectation& expectation : expected) {
    std::vector<std::string> peers;
    for (int i = 0; i < context_.size; ++i) {
      if (i == context_.rank || (expectation.peer != kAnySource && expectation.peer != i)) continue;
      peers.push_back(context_.name(i) + " (" + context_.whereabouts(i) + ")");
    }
    const bool send = expectation.kind == Message::Kind::Send;
    const std::string waited = ": Timed out after " + std::to_string(waited_ns / 1000000u) + " ms; ";
    text += (text.empty() ? "" : "; also ") + expectation.title + (text.empty() ? waited : ": ") +
            (send ? "does not receive: " : "has sent nothing that matches: ") + join_names(peers);
  }
  give_up(ErrorKind::TimedOut, text);
}

// Once this throws, the caller may free its messages' memory: no thread may be in the middle of moving them.
void Mailbox::give_up(ErrorKind kind, const std::string& text) {
  context_.abort(kind, text);
  { std::lock_guard<std::mutex> until_nothing_moves(mutex_); }
  throw_error(kind, text);
}

std::string Mailbox::title(const Message& message) const {
  const std::string peer = message.peer == kAnySource ? "any rank" : context_.name(message.peer);
  return std::string(message.kind == Message::Kind::Send ? "send(to " : "recv(from ") + peer +
         ", tag=" + std::to_string(message.tag) + ", bytes=" + std::to_string(message.bytes) + ") on " +
         context_.name(context_.rank);
}

}  // namespace opensmd
