// Reduce-scatter and all-gather in one pipeline through the chunks of the arena.
//
// The array is cut into chunks, each chunk into one part a member. Of every chunk, in turn, a member
//
//   publishes  the parts of the others into its slot           own slot   [ . | b | c ]      counter `published`
//   reduces    its own part from its array and all slots       own slot   [ A | b | c ]      counter `reduced`
//   collects   the reduced parts of the others                 own array  [ A | B | C ]      counter `consumed`
//
//      step        0    1    2    3    4                a slot is free for a later step
//
//      publish     p0   p1   p2   p3   p4 ...           once all members have consumed step k
//      reduce           r0   r1   r2   r3 ...
//      collect               c0   c1   c2 ...
//
// No member waits while it can do any of the three; it waits only for the step it itself needs next, which is never
// later than a step it has published, so nobody waits in a circle.
// Per member and byte of the array: 1 + 1/n reads and 1 write on the way in, 1 read and 1 write on the way out.
#pragma once

#include "kernels.hpp"
#include "round.hpp"

namespace opensmd {

struct TwoShotOptions {
  const void* in;
  void* out;  // may be `in`; null on members that collect nothing
  size_t bytes;
  int root = -1;  // the one member that collects; -1: all
  const double* factors = nullptr;
};

// How an array of `bytes` is cut; the stream's first slot depends on it.
size_t two_shot_chunk(const Context& context, size_t bytes);

// After all have met, having announced their first slots.
void two_shot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options);

}  // namespace opensmd
