// Lists of tensors, and a tensor cut among ranks, as the transport takes them: a pointer and a count for each rank.
#pragma once

#include <vector>

#include "torch/backend.hpp"

namespace opensmd {

// Core elements of each tensor, `units` for each of its own.
std::vector<size_t> counts_of(const Tensors& tensors, size_t units);

// Where each rank's part of one run of memory begins.
std::vector<char*> slices(void* base, const std::vector<size_t>& counts, DType dtype);

template <typename Pointer>
void* const* as_outputs(const std::vector<Pointer>& all) {
  return reinterpret_cast<void* const*>(all.data());
}

template <typename Pointer>
const void* const* as_inputs(const std::vector<Pointer>& all) {
  return reinterpret_cast<const void* const*>(all.data());
}

}  // namespace opensmd
