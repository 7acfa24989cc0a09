// Where a member's data can be read by its peers: announced in the payload of its entry line.
#pragma once

#include <cstring>

#include "core/protocol/round.hpp"

namespace opensmd {

struct Placement {
  uint64_t offset = 0;      // of the tensor in the heap, or of the staged data in the stage
  uint32_t in_heap = 0;
  uint32_t first_slot = 0;  // of its stream, if there is one
  uint32_t chain = 0;       // whether it would sum along a chain
};
static_assert(sizeof(Placement) <= kInlineBytes);

inline void announce(Round& round, const Placement& placement) {
  std::memcpy(round.payload(), &placement, sizeof(placement));
}

inline Placement announced(const Round& round, int member) {
  Placement placement;
  std::memcpy(&placement, round.payload_of(member), sizeof(placement));
  return placement;
}

// A tensor is moved from where it lies if that is the heap and it is large enough to be worth the closing barrier.
inline bool place_in_heap(const Context& context, const void* data, size_t bytes, Placement& placement) {
  if (bytes < context.arena.shape().zero_copy_bytes || !context.heap.contains(data, bytes)) return false;
  placement.in_heap = 1;
  placement.offset = context.heap.offset_of(data);
  return true;
}

// Call once all have met.
inline int members_in_heap(const Context& context, const Round& round) {
  int count = 0;
  for (int i = 0; i < context.size; ++i) count += static_cast<int>(announced(round, i).in_heap);
  return count;
}

inline std::byte* tensor_in_heap(const Context& context, const Round& round, int member) {
  return context.arena.heap(member) + announced(round, member).offset;
}

// Waits until no peer touches our tensor any more, nor we theirs.
inline void finish_together(Context& context, Round& round) {
  const uint32_t mine = ++context.finishes;
  round.set(context.arena.member(context.rank).finished, mine);
  for (int step = 1; step < context.size; ++step) {
    const int peer = (context.rank + step) % context.size;
    round.wait(context.arena.member(peer).finished, mine, peer);
  }
}

}  // namespace opensmd
