// Where a member's tensor can be read by its peers: announced in the payload of its entry line.
#pragma once

#include <cstring>

#include "round.hpp"

namespace opensmd {

constexpr uint64_t kNotInHeap = ~uint64_t{0};

inline void announce(Round& round, uint64_t heap_offset) {
  std::memcpy(round.payload(), &heap_offset, sizeof(heap_offset));
}

inline uint64_t announced(const Round& round, int member) {
  uint64_t offset;
  std::memcpy(&offset, round.payload_of(member), sizeof(offset));
  return offset;
}

// A tensor is moved from where it lies if it lies in the heap and is large enough to be worth the closing meeting.
inline uint64_t heap_offset(const Context& context, const void* data, size_t bytes) {
  const bool worthwhile = bytes >= context.arena.shape().zero_copy_bytes && context.heap.contains(data, bytes);
  return worthwhile ? context.heap.offset_of(data) : kNotInHeap;
}

// Until no peer touches our tensor any more, nor we theirs.
inline void finish_together(Context& context, Round& round) {
  const uint32_t mine = ++context.finishes;
  round.set(context.arena.member(context.rank).finished, mine);
  for (int step = 1; step < context.size; ++step) {
    const int peer = (context.rank + step) % context.size;
    round.wait(context.arena.member(peer).finished, mine, peer);
  }
}

}  // namespace opensmd
