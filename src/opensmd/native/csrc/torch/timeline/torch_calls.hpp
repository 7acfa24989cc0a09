// Notes the collectives and messages of torch's own backends in the process's EventLog.
//
// All of c10d goes through operators of torch's dispatcher, even what DDP's reducer calls from C++, and no backend but
// NCCL reports when a call has ended. So the operators' kernels for CPU tensors are replaced by one that calls the
// original and asks the future of the result for the end. Groups stay unchanged, and so do handles that have a future;
// others are wrapped.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>

namespace opensmd {

// From now on, for all of the process's groups that smddp does not serve; calling it again changes nothing.
void record_calls_of_torch();
// Undoes that.
void leave_calls_of_torch();

// Notes the calls of a backend for CUDA tensors, through torch's hook for that, which only NCCL has: a call lasts from
// when it was queued for as long as the device worked on it. `group`: its number in the EventLog. Throws if the backend
// has no such hook, or already uses it.
void record_device_calls(c10d::Backend& backend, uint32_t group);

}  // namespace opensmd
