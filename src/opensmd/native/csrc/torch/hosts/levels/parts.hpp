// Memory cut into the parts in which it travels, and into the members' slices.
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
// Enough that the tail of the last part hardly shows. Along a chain, each host begins one part later than the one
// before it; but every part is a round in shared memory.
constexpr size_t kFewestParts = 4;
constexpr size_t kFewestInChain = 48;
constexpr size_t kFewestInShortChain = 8;  // of less than kLeastOfPart each
// For a sum along a ring: one part is worked on while the other travels. Finer cutting makes more messages.
constexpr size_t kFewestInRing = 2;
// If such a sum exceeds this over the number of members of a host that cross, each host also reduces it in parts.
constexpr size_t kMostOfBlock = 1u << 20;

constexpr size_t kLeastOfPart = 64u << 10;
// For a coded sum: where codes are cut decides how they are rounded, so this must not depend on the network.
constexpr size_t kLeastOfSum = 256u << 10;
constexpr size_t kLeastInChain = 16u << 10;

// The smallest piece worth sending along a ring of hosts, and the smallest of a sum in a single part; less is better
// sent to all others at once, in one step.
constexpr size_t kLeastInRing = 32u << 10;
constexpr size_t kLeastOfRing = 18u << 10;
// Likewise where hosts take turns, in one part or more: the smallest cut, and the largest, which bounds how long a late
// one keeps others waiting, and is below kShort (wire.hpp).
constexpr size_t kLeastOfTurn = 20u << 10;
constexpr size_t kMostOfTurn = 48u << 10;

// Smaller sums are not worth several connections at once.
constexpr size_t kSplitBytes = 32u << 10;

// How many parts have their memory posted ahead: those that may be in transit, and one that is being worked on.
constexpr size_t kAhead = 4;

// Memory in equal parts, which begin at cache lines.
struct Parts {
  size_t bytes;  // of all
  size_t each;

  // Parts of about `most` bytes; smaller if that made fewer than `fewest` parts, but not below `least`.
  static Parts of(size_t bytes, size_t most, size_t fewest, size_t least = kLeastOfPart) {
    return {bytes, round_up(std::clamp(bytes / fewest, least, most), kLine)};
  }
  // Parts of a sum along a ring of `hosts`, where `members` of each host cross.
  static Parts in_ring(size_t bytes, size_t hosts, size_t members) {
    const bool whole = bytes <= kMostOfBlock / members || bytes / kFewestInRing / hosts / members < kLeastInRing;
    return of(bytes, kMostOfSum, whole ? 1 : kFewestInRing);
  }
  // Parts of a sum in which hosts take turns.
  static Parts in_turns(size_t bytes, size_t cuts) {
    const size_t most = kMostOfTurn * cuts, parts = (bytes + most - 1) / most;
    return of(bytes, most, bytes / kFewestInRing / cuts < kLeastOfTurn ? 1 : std::max(parts, kFewestInRing));
  }
  // Parts of what goes along a chain of `hosts`.
  static Parts along(int hosts, size_t bytes) {
    if (hosts <= 2) return of(bytes, kMostOfPart, kFewestParts);
    return of(bytes, kMostOfPart, kFewestInChain, std::clamp(bytes / kFewestInShortChain, kLeastInChain, kLeastOfPart));
  }

  size_t count() const { return bytes == 0 ? 0 : (bytes + each - 1) / each; }
  Part part(size_t index) const { return {index * each, std::min(each, bytes - index * each)}; }
};

// The cuts of each part of a sum in which hosts take turns: one per host and member that crosses.
inline size_t cuts_of(const Layout& layout) { return static_cast<size_t>(layout.hosts() * layout.fewest_on_a_host()); }

inline Parts parts_in_ring(const Layout& layout, size_t bytes) {
  return Parts::in_ring(bytes, static_cast<size_t>(layout.hosts()), static_cast<size_t>(layout.fewest_on_a_host()));
}

// How many pieces each cut of a sum goes in: with a single part, pieces follow one another in place of parts. Unlike
// the number of parts, theirs does not affect which host adds up which numbers.
inline size_t pieces_of_cuts(const Parts& parts, size_t cuts) {
  return parts.count() == 1 && parts.bytes / kFewestInRing / cuts >= kLeastInRing ? kFewestInRing : 1;
}

// One piece of a host's cut of a slice.
inline Part piece_of_cut(size_t slice_bytes, int hosts, int host, size_t pieces, size_t piece) {
  const Part cut = part_of(slice_bytes, hosts, host);
  const Part found = part_of(cut.bytes, static_cast<int>(pieces), static_cast<int>(piece));
  return {cut.offset + found.offset, found.bytes};
}

// How many members of each host share a part of a sum.
inline int takers_of(const Layout& layout, size_t bytes) {
  return bytes < kSplitBytes ? 1 : layout.fewest_on_a_host();
}

// Whether each member sends something to, or gets something from, all others.
inline bool all_give(const size_t* counts, int members) {
  return std::all_of(counts, counts + members, [](size_t count) { return count > 0; });
}

// Memory cut among members, as the calls of core/group.hpp take it.
struct Slices {
  std::vector<char*> data;
  std::vector<size_t> counts;  // of elements

  void* const* outputs() const { return reinterpret_cast<void* const*>(data.data()); }
  const void* const* inputs() const { return reinterpret_cast<const void* const*>(data.data()); }
};

// Even slices for the first `takers` of `members`, none for the others.
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
