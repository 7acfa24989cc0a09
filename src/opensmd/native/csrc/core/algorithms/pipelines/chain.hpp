// All-reduce of more members than cores: each in turn adds its array to a sum in shared memory, chunk by chunk.
//
//      member 0   writes its chunk into a slot      member 0's stage   [ c0 | c1 | c2 | ... ]
//      member 1   adds its own to it
//      ...
//      the last   adds its own and has the sum      all others copy it from there
//
// Members that share a core cannot work at the same time, so taking turns costs them nothing. Bytes are moved less often
// than in two_shot.hpp, and all members work on the same few slots, which stay in the caches.
//
// A member that cannot go on waits for the member before it, or for a sum if it has added to all slots. A sum needs
// only members behind it, and none of them waits for this one to collect, so members never wait in a circle.
#pragma once

#include "core/kernels/kernels.hpp"
#include "core/protocol/round.hpp"

namespace opensmd {

struct ChainOptions {
  void* data;
  size_t bytes;
  DType dtype;
  Reduction reduction;
};

// Call after all have met. The reduction must combine in parts (kernels.hpp).
void chain(Context& context, Round& round, const ChainOptions& options);

}  // namespace opensmd
