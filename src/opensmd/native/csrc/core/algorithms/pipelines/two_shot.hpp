// Reduce-scatter and all-gather in one pipeline through the stages of the arena.
//
// The array is cut into chunks, each chunk into one part per member. For every chunk, in turn, a member
//
//   publishes  the parts of the others into its slot             own slot   [ . | b | c ]      counter `published`
//   reduces    its own part of its array and all others' slots,
//              into its array and back into all others' slots    slot of 1  [ A | . | c ]      counter `reduced`
//   collects   the reduced parts that the others left it         own slot   [ . | B | C ]
//
//      step        0    1    2    3    4    5
//
//      publish     p0   p1   p2             p3   ...    some steps ahead; a slot is free once its own member has
//      reduce                     r0   r1        r2     collected it
//      collect                              c0    ...
//
// Results travel back through the slot they came from because the line a member has just read can also be written at no
// cost, while other memory would first have to be fetched from the others' caches. Only a slot's owner uses it again.
// Slots take turns, from call to call as well (see stage.hpp).
//
// A member waits only when it can do none of the three, and then only for the step it needs next, which is never later
// than one it has published, so members never wait in a circle.
#pragma once

#include "core/kernels/kernels.hpp"
#include "core/protocol/round.hpp"

namespace opensmd {

struct TwoShotOptions {
  const void* in;
  void* out;  // may be `in`; null on members that collect nothing
  size_t bytes;
  int root = -1;  // the member that collects; -1: all
  const double* factors = nullptr;
};

// Call before all meet: the slot this member will begin with, for its placement.
uint32_t two_shot_slot(const Context& context, size_t bytes);

// Call after all have met and announced their placements.
void two_shot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options);

}  // namespace opensmd
