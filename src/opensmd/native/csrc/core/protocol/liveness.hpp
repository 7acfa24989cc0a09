// Whether the other members' processes are alive, stopped, or cannot be judged from here.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <vector>

#include "core/memory/arena.hpp"
#include "core/protocol/member_status.hpp"

namespace opensmd {

class Liveness {
 public:
  Liveness(Arena& arena, int rank);  // publishes this process in the arena
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  MemberState state_of(int member) const;
  bool gone(int member) const;  // dead or another program; ignores mere stops, so it is cheap
  void mark_left();

 private:
  enum class Handle { Unopened, Pidfd, Unavailable };
  struct Peer {
    Handle handle = Handle::Unopened;
    int pidfd = -1;
  };
  bool same_pids(const Identity& identity) const;
  bool dead(const Identity& identity, Peer& peer) const;
  static bool replaced(const Identity& identity);

  Arena& arena_;
  int rank_;
  pid_t pid_;
  uint64_t pid_namespace_;
  mutable std::mutex mutex_;  // a collective and a message may both check
  mutable std::vector<Peer> peers_;
};

}  // namespace opensmd
