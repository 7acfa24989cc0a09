// What has ended in this process and is not yet written down: a ring of its own memory, to which any thread adds without
// a lock and from which one thread takes.
//
//      slot:   turn == position       free for the event of this number
//              turn == position + 1   holds it
//
// A position counts on for ever; its slot is the remainder. A full ring keeps what it has, and counts what came too late.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace opensmd {

// One collective or message, as files of a timeline hold it (opensmd/timeline/frames.py).
struct Event {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t bytes = 0;
  uint64_t sequence = 0;   // of the group's collectives, alike on all members; nothing for messages
  uint32_t group = 0;      // by EventLog::add_group; 0: one that nobody has made known
  int32_t peer = -1;       // the other member of a message
  uint32_t operation = 0;  // by EventLog::operation
  uint32_t unused = 0;
};
static_assert(sizeof(Event) == 48, "the reader takes them as they lie");

class EventRing {
 public:
  // What was left out since the last look, and when the first of it began.
  struct Lost {
    uint64_t count = 0;
    uint64_t first_ns = 0;
  };

  explicit EventRing(size_t capacity);  // a power of two

  // Any thread. Whether half of the ring is taken from this event on, so that somebody should look.
  bool add(const Event& event);
  // One thread at a time: what has been added, and forget it.
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
