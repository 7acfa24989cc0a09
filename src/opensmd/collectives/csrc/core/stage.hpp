// A member's own stretch of shared memory for data on its way to the others: two small notes, and a ring.
//
//   | note 0 | note 1 | ring: ....[older][step 0][step 1][step 2]-> cursor ......|
//
// Positions in the ring move on from call to call, through more than a core's own cache holds, because writing to a
// line that a reader still has in its cache costs four times as much as writing to one it has long dropped (7 against
// 1.6 ns a line where this was measured). Data of up to a page does better in notes that stay in the cache.
//
// Why nothing is overwritten too early: data staged for call s may be read until all peers have posted call s+1;
// notes go by parity, and what is placed for s+1 lies behind it in the ring. Of streamed steps, at most half a ring is
// unread at any time (stage_depth), and none of an earlier call once all have met in a later one. The other half, four
// chunks, takes what is placed next and what is lost by rounding to slots.
#pragma once

#include "arena.hpp"

namespace opensmd {

class Stage {
 public:
  Stage(Arena& arena, int rank) : arena_(arena), rank_(rank) {}

  // Where to put `bytes` (at most staging_bytes) for call `sequence`: an offset for at().
  uint64_t place(uint64_t sequence, size_t bytes);

  // Streaming in slots of `slot_bytes` (at most chunk_bytes): the first slot, were it to begin now.
  uint64_t first_slot(size_t slot_bytes) const;
  void begin_steps(uint64_t first, size_t slot_bytes, uint32_t steps);

  std::byte* at(uint64_t offset) const { return arena_.stage(rank_) + offset; }

 private:
  void reserve(size_t end);

  Arena& arena_;
  int rank_;
  size_t cursor_ = 0;    // in the ring
  size_t reserved_ = 0;  // from the beginning of the stage
};

// Step `step` of a stream that began in slot `first` of `member`'s stage.
inline std::byte* stage_slot(const Arena& arena, int member, uint64_t first, size_t slot_bytes, uint32_t step) {
  const size_t slots = arena.stage_ring_bytes() / slot_bytes;
  return arena.stage(member) + kNotesBytes + (first / slot_bytes + step) % slots * slot_bytes;
}

// How many steps a writer may be ahead of its slowest reader: as far as possible, because on busy machines a reader
// may not be running just now.
inline uint32_t stage_depth(const Arena& arena, size_t slot_bytes) {
  return static_cast<uint32_t>(arena.stage_ring_bytes() / 2 / slot_bytes);
}

}  // namespace opensmd
