#include "core/protocol/context.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace opensmd {

namespace {

GroupConfig checked(GroupConfig config) {
  if (config.size < 1 || config.size > kMaxMembers || config.rank < 0 || config.rank >= config.size) {
    throw std::invalid_argument("rank " + std::to_string(config.rank) + " of " + std::to_string(config.size) +
                                " is not a member of a shared-memory group of 1 to " + std::to_string(kMaxMembers));
  }
  for (int i = static_cast<int>(config.names.size()); i < config.size; ++i) {
    config.names.push_back("rank " + std::to_string(i));
  }
  return config;
}

int shared_cores(const GroupConfig& config) {
  return config.cores > 0 ? config.cores : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

unsigned spin_nanoseconds(const GroupConfig& config) {
  if (config.waiting.spin_microseconds >= 0) return static_cast<unsigned>(config.waiting.spin_microseconds) * 1000;
  return config.size <= shared_cores(config) ? 2000 : 0;
}

}  // namespace

Context::Context(GroupConfig given)
    : config(checked(std::move(given))), rank(config.rank), size(config.size), timeout(config.timeout),
      arena(config.fd, config.rank, config.shared_mapping), liveness(arena, rank),
      record(arena, rank, Record::Collectives), heap(arena, rank), stage(arena, rank),
      cores(shared_cores(config)), spin_ns(spin_nanoseconds(config)) {
  if (arena.shape().size != size) {
    throw std::invalid_argument("the shared memory was made for " + std::to_string(arena.shape().size) +
                                " members, the group has " + std::to_string(size));
  }
}

uint64_t Context::timeout_ns(milliseconds asked) const {
  const int64_t chosen = (asked.count() > 0 ? asked : timeout.load()).count();
  // A century stands for "forever" and does not overflow.
  return static_cast<uint64_t>(std::clamp<int64_t>(chosen, 1, int64_t{1000} * 3600 * 24 * 36500)) * 1000000u;
}

void Context::abort(ErrorKind kind, const std::string& text) {
  ArenaHeader& header = arena.header();
  uint32_t fine = 0;
  if (!header.abort_state.compare_exchange_strong(fine, 1)) return;
  header.abort_kind.store(static_cast<uint32_t>(kind));
  const size_t length = std::min(text.size(), sizeof(header.abort_text) - 1);
  std::memcpy(header.abort_text, text.data(), length);
  header.abort_text[length] = '\0';
  header.abort_state.store(2);
}

ErrorKind Context::abort_kind() const {
  return static_cast<ErrorKind>(arena.header().abort_kind.load());
}

std::string Context::abort_text() const {
  const ArenaHeader& header = arena.header();
  for (int tries = 0; header.abort_state.load(std::memory_order_acquire) == 1 && tries < 100; ++tries) usleep(1000);
  switch (header.abort_state.load(std::memory_order_acquire)) {
    case 0: return {};
    case 2: return header.abort_text;
    default: return "a member died while it was reporting an error";
  }
}

void Context::fail(ErrorKind kind, const std::string& text) {
  abort(kind, text);
  throw_error(kind, text);
}

void Context::check_usable(const char* what) const {
  fork_guard.check();
  if (left) throw CollectiveError(std::string(what) + " on " + name(rank) + ": the group has been destroyed");
  if (aborted()) {
    throw Aborted(std::string(what) + " on " + name(rank) + " fails because the group was aborted; the first cause: " +
                  abort_text());
  }
}

std::string Context::describe(int member, uint64_t sequence) const {
  return Record(arena, member, Record::Collectives).at(sequence).describe(&config.names);
}

std::string Context::whereabouts(int member) const {
  const MemberState state = liveness.state_of(member);
  if (state == MemberState::NotJoined) return name_of(state);
  const Progress& progress = arena.member(member).progress;
  const uint64_t entered = progress.entered.load();
  std::string words;
  if (state != MemberState::Running) words = std::string(name_of(state)) + "; ";
  if (entered == 0) return words + "it has entered no collective yet";
  const bool inside = progress.completed.load() < entered;
  return words + (inside ? "it is in " : "its last call was ") +
         describe(member, entered) + " #" + std::to_string(entered);
}

std::string join_names(const std::vector<std::string>& names) {
  std::string joined;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) joined += i + 1 == names.size() ? " and " : ", ";
    joined += names[i];
  }
  return joined;
}

}  // namespace opensmd
