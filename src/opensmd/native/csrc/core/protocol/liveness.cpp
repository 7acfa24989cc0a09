#include "core/protocol/liveness.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace opensmd {

namespace {

struct ProcessStat {
  char state = '?';
  uint64_t start_time = 0;
  uint64_t start_stack = 0;  // 0 also where this user may not know it
};

// Moves `field` on to the one of this number, and returns its value.
uint64_t skip_to(int number, int& at, const char*& field) {
  for (; at < number && field != nullptr; ++at) {
    field = std::strchr(field, ' ');
    if (field != nullptr) ++field;
  }
  return field == nullptr ? 0 : std::strtoull(field, nullptr, 10);
}

// Fields 3, 22 and 28 of /proc/<pid>/stat; the command in field 2 may contain anything, so search for its last bracket.
ProcessStat read_stat(pid_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(pid));
  ProcessStat stat;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return stat;
  char text[1024];
  const ssize_t length = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (length <= 0) return stat;
  text[length] = '\0';
  const char* field = std::strrchr(text, ')');
  if (field == nullptr || field[1] != ' ') return stat;
  field += 2;
  stat.state = *field;
  int at = 3;
  stat.start_time = skip_to(22, at, field);
  stat.start_stack = skip_to(28, at, field);
  return stat;
}

uint64_t own_pid_namespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

}  // namespace

const char* name_of(MemberState state) {
  switch (state) {
    case MemberState::NotJoined: return "has not joined the group";
    case MemberState::Running: return "running";
    case MemberState::Stopped: return "its process is stopped";
    case MemberState::Dead: return "its process has died";
    case MemberState::Replaced: return "its process has become another program";
    case MemberState::Left: return "has left the group";
    case MemberState::Unknown: return "in another pid namespace";
  }
  return "unknown";
}

Liveness::Liveness(Arena& arena, int rank)
    : arena_(arena), rank_(rank), pid_(getpid()), pid_namespace_(own_pid_namespace()),
      peers_(static_cast<size_t>(arena.shape().size)) {
  Identity& identity = arena_.member(rank).identity;
  Presence presence = identity.presence.load();
  if (presence == Presence::Absent) {
    identity.pid = pid_;
    const ProcessStat own = read_stat(pid_);
    identity.start_time = own.start_time;
    identity.start_stack = own.start_stack;
    identity.pid_namespace = pid_namespace_;
    if (identity.presence.compare_exchange_strong(presence, Presence::Joined)) return;
  }
  throw CollectiveError("two processes joined one shared-memory group as the same member (" + std::to_string(rank) +
                        "); the other one is process " + std::to_string(identity.pid));
}

Liveness::~Liveness() {
  for (const Peer& peer : peers_) {
    if (peer.pidfd >= 0) close(peer.pidfd);
  }
}

void Liveness::mark_left() { arena_.member(rank_).identity.presence.store(Presence::Left); }

bool Liveness::same_pids(const Identity& identity) const {
  return pid_namespace_ != 0 && identity.pid_namespace == pid_namespace_;
}

bool Liveness::dead(const Identity& identity, Peer& peer) const {
  if (identity.pid == pid_) return false;
  if (peer.handle == Handle::Unopened) {
    peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, identity.pid, 0));
    if (peer.pidfd < 0 && errno == ESRCH) return true;
    peer.handle = peer.pidfd >= 0 ? Handle::Pidfd : Handle::Unavailable;
    const uint64_t start = read_stat(identity.pid).start_time;
    // The pid may have been reused before we opened it.
    if (start != 0 && identity.start_time != 0 && start != identity.start_time) {
      if (peer.pidfd >= 0) close(peer.pidfd);
      peer = Peer{};
      return true;
    }
  }
  if (peer.handle == Handle::Pidfd) {
    pollfd poll_entry{peer.pidfd, POLLIN, 0};
    return poll(&poll_entry, 1, 0) > 0;
  }
  if (kill(identity.pid, 0) != 0 && errno == ESRCH) return true;
  const ProcessStat stat = read_stat(identity.pid);
  return stat.state == 'Z' || stat.state == 'X' || (stat.start_time != 0 && stat.start_time != identity.start_time);
}

bool Liveness::replaced(const Identity& identity) {
  const ProcessStat now = read_stat(identity.pid);
  return now.start_time == identity.start_time && now.start_stack != 0 && identity.start_stack != 0 &&
         now.start_stack != identity.start_stack;
}

bool Liveness::gone(int member) const {
  const Identity& identity = arena_.member(member).identity;
  if (identity.presence.load() != Presence::Joined || !same_pids(identity)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return dead(identity, peers_[static_cast<size_t>(member)]) || replaced(identity);
}

MemberState Liveness::state_of(int member) const {
  const Identity& identity = arena_.member(member).identity;
  switch (identity.presence.load()) {
    case Presence::Absent: return MemberState::NotJoined;
    case Presence::Left: return MemberState::Left;
    case Presence::Joined: break;
  }
  if (!same_pids(identity)) return MemberState::Unknown;
  if (gone(member)) return replaced(identity) ? MemberState::Replaced : MemberState::Dead;
  const char state = read_stat(identity.pid).state;
  return state == 'T' || state == 't' ? MemberState::Stopped : MemberState::Running;
}

}  // namespace opensmd
