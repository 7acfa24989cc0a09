// Collectives without torch.distributed's Python: checked, run at once in the calling thread, and finished on return.
// torch.ops.opensmd finds the group by name; a DirectGroup holds it, at a third of the cost.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string_view>

#include "torch/backend.hpp"

namespace opensmd {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Each writes to its first tensor. `op`: sum, avg, product, min, max, band, bor or bxor.
void direct_all_reduce(c10d::Backend& backend, const at::Tensor& tensor, std::string_view op);
void direct_broadcast(c10d::Backend& backend, const at::Tensor& tensor, int64_t root);
void direct_all_gather(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input);
void direct_reduce_scatter(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input, std::string_view op);
void direct_all_to_all(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input);

// A group whose collectives are called directly. It keeps the group alive, but not usable: after destroy_process_group
// every call throws.
class DirectGroup {
 public:
  explicit DirectGroup(GroupPtr group);

  void all_reduce(const at::Tensor& tensor, std::string_view op) const;
  void broadcast(const at::Tensor& tensor, int64_t root) const;
  void all_gather(const at::Tensor& output, const at::Tensor& input) const;
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, std::string_view op) const;
  void all_to_all(const at::Tensor& output, const at::Tensor& input) const;

 private:
  c10d::Backend& backend_for(const at::Tensor& tensor) const;

  GroupPtr group_;
  BackendPtr cpu_;  // null if the group has no backend for CPU tensors
};

}  // namespace opensmd
