// Reduce-scatter and all-gather in one pipeline through the stages of the arena.
//
// The array is cut into chunks, each chunk into one part a member. Of every chunk, in turn, a member
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
// Why results travel back through the slot they came from: the line that a member has just read it may also write at
// no cost, while a second stretch of memory would have to be taken out of the others' caches first. Nobody but a slot's
// owner uses it again. Slots take turns, also from call to call (see stage.hpp).
//
// No member waits while it can do any of the three; it waits only for the step it itself needs next, which is never
// later than a step it has published, so nobody waits in a circle.
#pragma once

#include "core/kernels/kernels.hpp"
#include "core/protocol/round.hpp"

namespace opensmd {

struct TwoShotOptions {
  const void* in;
  void* out;  // may be `in`; null on members that collect nothing
  size_t bytes;
  int root = -1;  // the one member that collects; -1: all
  const double* factors = nullptr;
};

// Before all meet: which slot this member will begin with, for its placement.
uint32_t two_shot_slot(const Context& context, size_t bytes);

// After all have met and announced their placements.
void two_shot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options);

}  // namespace opensmd
