// A member's shared memory for data on its way to the others:
//
//   | note 0 | note 1 | placed data ....-> cursor ......| streams ....-> cursor ..........................|
//
// Placed data is written before a call's round: whole tensors of up to staging_bytes. Streams are written after it,
// slot by slot.
//
// Where readers only read, positions move on from call to call: a line returns to its writer in 7 ns while a reader
// still caches it, in 1.6 ns once the reader has long dropped it (measured between cores under one cache). Moving on
// further than that needs is slow too, because memory untouched for long is in no cache at all: so streams that need
// less than half of the region wrap around within that half. Data of up to a page does better in notes that stay in the
// cache.
//
// Why nothing is overwritten too early: data placed for call s may be read until all peers have posted call s+1; notes
// alternate by parity, and what is placed for s+1 lies behind it. Once all have met in a call, nothing of an earlier
// one is read, so streams may begin anywhere; within a call a slot is rewritten once all have consumed it. Before they
// meet, peers may still be at the steps of the last call: a stream then writes only where counters say that they are
// not.
#pragma once

#include "core/memory/arena.hpp"

namespace opensmd {

class Stage {
 public:
  Stage(Arena& arena, int rank) : arena_(arena), rank_(rank) {}

  // Where to put `bytes` (at most staging_bytes) for call `sequence`: an offset for at().
  uint64_t place(uint64_t sequence, size_t bytes);
  std::byte* at(uint64_t offset) const { return arena_.stage(rank_) + offset; }

  // The first slot if a stream over `slots` slots of `slot_bytes` (at most chunk_bytes) began now.
  uint32_t first_slot(size_t slot_bytes, uint32_t slots) const;
  // Whether such a stream continues in the last one's slots, so that counters of steps tell which are free.
  bool continues(size_t slot_bytes, uint32_t slots) const { return slot_bytes == slot_bytes_ && slots == slots_; }
  void begin_stream(uint32_t first_slot, size_t slot_bytes, uint32_t slots, uint32_t steps);

 private:
  void reserve(size_t begin, size_t end, size_t limit, size_t& reserved);

  Arena& arena_;
  int rank_;
  size_t place_cursor_ = 0;
  size_t stream_cursor_ = 0;
  size_t slot_bytes_ = 0;  // of the last stream
  uint32_t slots_ = 0;
  size_t reserved_for_places_ = 0;
  size_t reserved_for_streams_ = 0;
};

// How many slots a stream wraps around in, which is how many steps its writer may be ahead of its slowest reader.
inline uint32_t stream_slots(const Arena& arena, size_t slot_bytes, uint32_t steps) {
  const size_t half = arena.streams_bytes() / 2;
  return static_cast<uint32_t>((steps * slot_bytes < half ? half : 2 * half) / slot_bytes);
}

// Slot `slot` of `member`'s streams.
inline std::byte* stream_slot(const Arena& arena, int member, size_t slot_bytes, uint32_t slot) {
  return arena.stage(member) + arena.streams_offset() + slot * slot_bytes;
}

}  // namespace opensmd
