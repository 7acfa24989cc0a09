// torch's allocator of CPU tensors, with KeptBlocks for large ones.
#pragma once

#include "torch/memory/kept_blocks.hpp"

namespace opensmd {

// From now on tensors of 1 MiB and more, of whatever thread, are kept blocks. A second call changes nothing.
void keep_tensor_memory();

// The blocks of this process; without effect before keep_tensor_memory().
KeptBlocks& tensor_blocks();

}  // namespace opensmd
