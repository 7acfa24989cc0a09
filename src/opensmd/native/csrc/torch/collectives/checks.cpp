#include "torch/collectives/checks.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace opensmd {

const at::Tensor& only(const Tensors& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "smddp: ", operation, " takes one tensor a rank, but got ", tensors.size());
  return tensors[0];
}

void require_dense(const at::Tensor& tensor, const char* operation) {
  require_cpu(tensor, operation);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "smddp: ", operation, " takes dense tensors, but got ",
                    tensor.layout(), "; only all_reduce takes sparse ones");
  TORCH_CHECK_VALUE(!tensor.is_quantized(), "smddp: ", operation, " got a quantized tensor, whose scale would be lost; use "
                    "tensor.int_repr() or tensor.dequantize()");
  require_memory(tensor, operation);
}

int narrowed(int64_t root) {
  return static_cast<int>(std::clamp<int64_t>(root, -1, std::numeric_limits<int>::max()));
}

void require_same_dtype(const at::Tensor& tensor, const at::Tensor& other, const char* operation) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == other.scalar_type(), "smddp: ", operation, " got tensors of ",
                    tensor.scalar_type(), " and ", other.scalar_type(), "; all must have the same dtype");
}

void require_count(size_t given, size_t expected, const char* what, const char* operation) {
  TORCH_CHECK_VALUE(given == expected, "smddp: ", operation, " got ", given, " ", what, ", expected ", expected);
}

void check_list(const Tensors& tensors, const at::Tensor& like, int size, const char* operation) {
  require_count(tensors.size(), static_cast<size_t>(size), "tensors in its list (one a rank)", operation);
  for (const auto& tensor : tensors) {
    require_dense(tensor, operation);
    require_same_dtype(tensor, like, operation);
  }
}

void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation) {
  require_dense(whole, operation);
  require_dense(part, operation);
  require_same_dtype(whole, part, operation);
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, "smddp: ", operation, " got tensors of ", whole.numel(),
                    " and ", part.numel(), " elements; in a group of ", size,
                    " ranks the one must have ", size, " times the elements of the other");
}

}  // namespace opensmd
