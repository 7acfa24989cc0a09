// torch's allocator of CPU tensors, with KeptBlocks for large ones.
#pragma once

#include "torch/memory/kept_blocks.hpp"

namespace opensmd {

// From now on, tensors of 1 MiB and more use kept blocks, in every thread. A second call changes nothing.
void keep_tensor_memory();

// The blocks of this process; unused before keep_tensor_memory().
KeptBlocks& tensor_blocks();

}  // namespace opensmd
