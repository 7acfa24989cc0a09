// torch.device(0), where the CPU stands in for CUDA.
#pragma once

namespace opensmd {

// Let a bare number name a CUDA device. Torch takes it for a device of the machine's accelerator, and fails if
// there is none.
void number_cuda_devices(bool on);

}  // namespace opensmd
