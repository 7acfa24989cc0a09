// What has ended in this process but is not yet written out: a ring in private memory, to which any thread adds without
// a lock and from which one thread takes.
//
//      slot:   turn == position       free for the event of this number
//              turn == position + 1   holds it
//
// Positions count on forever; a position's slot is its remainder. A full ring keeps what it has, and counts what came
// too late.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace opensmd {

// One collective or message, as timeline files hold it (opensmd/timeline/frames.py).
struct Event {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
  uint64_t sequence = 0;   // of the group's collectives, equal on all members; 0 for messages
  uint32_t group = 0;      // from EventLog::add_group; 0: not registered
  int32_t peer = -1;       // the other member of a message
  uint32_t operation = 0;  // from EventLog::operation
  uint32_t unused = 0;
};
static_assert(sizeof(Event) == 48, "the reader takes them as they lie");

class EventRing {
 public:
  // How many were dropped since the last look, and when the first of them began.
  struct Lost {
    uint64_t count = 0;
    uint64_t first_ns = 0;
  };

  explicit EventRing(size_t capacity);  // a power of two

  // Any thread. Whether this event fills half of the ring, so that it should be emptied.
  bool add(const Event& event);
  // One thread at a time: returns what has been added, and forgets it.
  std::vector<Event> take();
  Lost take_lost();

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> turn;
    Event event;
  };

  void lose(const Event& event);

  const size_t capacity_;
  const std::unique_ptr<Slot[]> slots_;
  alignas(64) std::atomic<uint64_t> added_{0};
  alignas(64) std::atomic<uint64_t> taken_{0};
  std::atomic<uint64_t> lost_{0};
  std::atomic<uint64_t> first_lost_ns_{0};
};

}  // namespace opensmd
