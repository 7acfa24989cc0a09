// What collectives require of their tensors, checked before any rank is waited for. All throw ValueError.
#pragma once

#include "torch/backend.hpp"

namespace opensmd {

const at::Tensor& only(const Tensors& tensors, const char* operation);
void require_dense(const at::Tensor& tensor, const char* operation);
// As the core takes it. A value out of range stays a rank that no group has.
int narrowed(int64_t root);
void require_same_dtype(const at::Tensor& tensor, const at::Tensor& other, const char* operation);
void require_count(size_t given, size_t expected, const char* what, const char* operation);

// Requires one tensor per rank, of the dtype of `like`.
void check_list(const Tensors& tensors, const at::Tensor& like, int size, const char* operation);

// The tensor forms follow NCCL's rule: element counts decide, shapes do not matter.
void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation);

}  // namespace opensmd
