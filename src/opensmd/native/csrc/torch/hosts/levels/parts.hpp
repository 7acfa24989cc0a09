// Runs of memory cut into the parts in which they travel, and into slices of members.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/kernels/types.hpp"
#include "core/memory/parts.hpp"
#include "torch/hosts/layout.hpp"

namespace opensmd::levels {

// Parts of what members send each other, and of an all_reduce, which sends each part twice.
constexpr size_t kMostOfPart = 1u << 20;
constexpr size_t kMostOfSum = 2u << 20;
// Enough that the tail of the last part hardly shows. Along a chain of hosts each begins a part later than the one
// before it; but every part is a round in shared memory.
constexpr size_t kFewestParts = 4;
constexpr size_t kFewestInChain = 48;
constexpr size_t kFewestInShortChain = 8;  // of less than kLeastOfPart each
// Of a sum that goes along a ring: one goes on while the other one travels. More of it makes more messages.
constexpr size_t kFewestInRing = 2;
// More of such a sum, divided by how many members of a host cross, is added up on each host in several parts, too.
constexpr size_t kMostOfBlock = 1u << 20;

constexpr size_t kLeastOfPart = 64u << 10;
// Of a sum that is coded: where codes are cut decides how they are rounded, so that this may not follow from the network.
constexpr size_t kLeastOfSum = 256u << 10;
constexpr size_t kLeastInChain = 16u << 10;

// Of what goes along a ring of hosts at a time, and of a sum that goes in a single part; less is better sent to all others at
// once, in one step.
constexpr size_t kLeastInRing = 32u << 10;
constexpr size_t kLeastOfRing = 18u << 10;
// Likewise of a sum that hosts send each other in turns, in one part or more. What is late keeps others waiting for no more
// than the most.
constexpr size_t kLeastOfTurn = 20u << 10;
constexpr size_t kMostOfTurn = 64u << 10;

// Less of a sum is not worth several connections at once.
constexpr size_t kSplitBytes = 32u << 10;

// Parts whose memory is posted ahead of them: as many as may be on their way, and one that is being worked on.
constexpr size_t kAhead = 4;

// A run of memory in equal parts. Parts begin at cache lines.
struct Parts {
  size_t bytes;  // of all
  size_t each;

  // Parts of about `most` bytes; of less where it would be fewer than `fewest` parts, but not less than `least`.
  static Parts of(size_t bytes, size_t most, size_t fewest, size_t least = kLeastOfPart) {
    return {bytes, round_up(std::clamp(bytes / fewest, least, most), kLine)};
  }
  // Of a sum that may go along a ring of so many hosts, of each of which so many members cross.
  static Parts in_ring(size_t bytes, size_t hosts, size_t members) {
    const bool whole = bytes <= kMostOfBlock / members || bytes / kFewestInRing / hosts / members < kLeastInRing;
    return of(bytes, kMostOfSum, whole ? 1 : kFewestInRing);
  }
  // Likewise of one that hosts send each other in turns.
  static Parts in_turns(size_t bytes, size_t cuts) {
    const size_t most = kMostOfTurn * cuts, parts = (bytes + most - 1) / most;
    return of(bytes, most, bytes / kFewestInRing / cuts < kLeastOfTurn ? 1 : std::max(parts, kFewestInRing));
  }
  // Of what goes along a chain of so many hosts.
  static Parts along(int hosts, size_t bytes) {
    if (hosts <= 2) return of(bytes, kMostOfPart, kFewestParts);
    return of(bytes, kMostOfPart, kFewestInChain, std::clamp(bytes / kFewestInShortChain, kLeastInChain, kLeastOfPart));
  }

  size_t count() const { return bytes == 0 ? 0 : (bytes + each - 1) / each; }
  Part part(size_t index) const { return {index * each, std::min(each, bytes - index * each)}; }
};

// Of each part of a sum in which hosts take turns: one for each host of each member that crosses.
inline size_t cuts_of(const Layout& layout) { return static_cast<size_t>(layout.hosts() * layout.fewest_on_a_host()); }

inline Parts parts_in_ring(const Layout& layout, size_t bytes) {
  return Parts::in_ring(bytes, static_cast<size_t>(layout.hosts()), static_cast<size_t>(layout.fewest_on_a_host()));
}

// In how many pieces each cut of a sum may go: if the sum has one part, these follow one another in its place. Unlike that of
// the parts, their number does not matter for which host adds up which numbers.
inline size_t pieces_of_cuts(const Parts& parts, size_t cuts) {
  return parts.count() == 1 && parts.bytes / kFewestInRing / cuts >= kLeastInRing ? kFewestInRing : 1;
}

// One of so many pieces of a host's cut of a slice.
inline Part piece_of_cut(size_t slice_bytes, int hosts, int host, size_t pieces, size_t piece) {
  const Part cut = part_of(slice_bytes, hosts, host);
  const Part found = part_of(cut.bytes, static_cast<int>(pieces), static_cast<int>(piece));
  return {cut.offset + found.offset, found.bytes};
}

// How many members of each host a part of a sum is cut among.
inline int takers_of(const Layout& layout, size_t bytes) {
  return bytes < kSplitBytes ? 1 : layout.fewest_on_a_host();
}

// Whether each member has something for, or gets something from, all others.
inline bool all_give(const size_t* counts, int members) {
  return std::all_of(counts, counts + members, [](size_t count) { return count > 0; });
}

// One run of memory cut among members, as the calls of core/group.hpp take it.
struct Slices {
  std::vector<char*> data;
  std::vector<size_t> counts;  // of elements

  void* const* outputs() const { return reinterpret_cast<void* const*>(data.data()); }
  const void* const* inputs() const { return reinterpret_cast<const void* const*>(data.data()); }
};

// Even slices for the first `takers` of so many members, none for the others.
inline Slices cut(void* data, size_t bytes, DType dtype, int takers, int members) {
  Slices found;
  for (int i = 0; i < members; ++i) {
    const auto [offset, length] = i < takers ? part_of(bytes, takers, i) : Part{bytes, 0};
    found.data.push_back(static_cast<char*>(data) + offset);
    found.counts.push_back(length / size_of(dtype));
  }
  return found;
}

}  // namespace opensmd::levels
