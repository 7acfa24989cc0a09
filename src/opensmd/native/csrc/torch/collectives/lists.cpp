#include "torch/collectives/lists.hpp"

#include <ATen/ATen.h>

namespace opensmd {

std::vector<size_t> counts_of(const Tensors& tensors, size_t units) {
  std::vector<size_t> counts;
  counts.reserve(tensors.size());
  for (const auto& tensor : tensors) counts.push_back(static_cast<size_t>(tensor.numel()) * units);
  return counts;
}

std::vector<char*> slices(void* base, const std::vector<size_t>& counts, DType dtype) {
  std::vector<char*> found;
  found.reserve(counts.size());
  char* next = static_cast<char*>(base);
  for (size_t count : counts) {
    found.push_back(next);
    next += count * size_of(dtype);
  }
  return found;
}

}  // namespace opensmd
