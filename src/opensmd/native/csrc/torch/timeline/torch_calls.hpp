// Notes the collectives that torch's own backends serve in the process's CallLog.
//
// Every collective of c10d goes through an operator of torch's dispatcher, also those that DDP's reducer calls from C++,
// and no backend but NCCL's tells when one has ended. So the operators' kernels for CPU tensors are replaced by one that
// calls the original, and asks the future of what that returns for the end. Groups and handles stay what they were.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>

namespace opensmd {

// From now on, for all groups of the process that smddp does not serve; calling it again changes nothing.
void log_calls_of_torch();
// As before the first.
void forget_calls_of_torch();

// Those of a backend for CUDA tensors, by torch's own hook for that, which NCCL's alone has: a call lasts from when it
// was queued for as long as the device worked on it. Throws where the backend has no such hook, or has been given one.
void log_device_calls(c10d::Backend& backend, std::string group);

}  // namespace opensmd
