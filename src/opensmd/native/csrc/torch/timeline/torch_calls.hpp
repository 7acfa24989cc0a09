// Notes the collectives and messages that torch's own backends serve in the process's EventLog.
//
// All of c10d goes through an operator of torch's dispatcher, also those that DDP's reducer calls from C++,
// and no backend but NCCL's tells when one has ended. So the operators' kernels for CPU tensors are replaced by one that
// calls the original, and asks the future of what that returns for the end. Groups stay what they were, and so do handles that have a future; others are wrapped.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>

namespace opensmd {

// From now on, for all groups of the process that smddp does not serve; calling it again changes nothing.
void record_calls_of_torch();
// As before the first.
void leave_calls_of_torch();

// Those of a backend for CUDA tensors, by torch's own hook for that, which NCCL's alone has: a call lasts from when it
// was queued for as long as the device worked on it. `group`: its number in the EventLog. Throws where the backend has no
// such hook, or has been given one.
void record_device_calls(c10d::Backend& backend, uint32_t group);

}  // namespace opensmd
