// Between tensors and plain memory: dtypes, reductions, and tensors whose elements do not lie in a row.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <vector>

#include "core/group.hpp"

namespace opensmd {

// How elements of a tensor travel: `units` core elements of `dtype` for each element of the tensor.
struct Elements {
  DType dtype;
  size_t units;
};

// For moving: dtypes that the core does not know are bytes.
Elements moved_as(at::ScalarType type);
// For reducing. Throws NotImplementedError, naming both, where the dtype has no such reduction.
Elements reduced_as(at::ScalarType type, Reduction reduction);

struct Reducing {
  Reduction reduction;
  double factor;
};

Reducing reducing(const c10d::ReduceOp& op);

// Throws ValueError for a tensor whose storage was freed (FSDP does so); it would crash the process.
void require_memory(const at::Tensor& tensor, const char* operation);

// Of the tensors beside the first, whose device says where a call goes. The core cannot read memory of a device; NCCL does
// not look at all tensors of some calls, and its kernels would read what is none. Both throw ValueError.
void require_cpu(const at::Tensor& tensor, const char* operation);
void require_on_device(at::TensorList tensors, const char* operation);

// Of its numbers and, where it is sparse, of their places.
size_t bytes_of(const at::Tensor& tensor);

// Gives a tensor the elements of another, in whichever thread: that has not the modes of autograd that the caller has.
void write_back(const at::Tensor& tensor, const at::Tensor& from);

// A tensor as one run of memory. A tensor that is none is copied; finish() copies results back.
class Flat {
 public:
  enum class Use { Read, Write, ReadWrite };
  Flat(at::Tensor tensor, Use use);
  void* data() const { return flat_.data_ptr(); }
  size_t numel() const { return static_cast<size_t>(flat_.numel()); }
  bool overlaps(const Flat& other) const;
  void copy();  // what is only read, before others write into its memory
  void finish();

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
  Use use_;
};

std::vector<Flat> flats(const std::vector<at::Tensor>& tensors, Flat::Use use);
std::vector<void*> pointers(const std::vector<Flat>& all);
void finish(std::vector<Flat>& all);

// "shape [2, 3]" for error messages, made without allocating: it is written at every call.
class ShapeText {
 public:
  explicit ShapeText(const at::Tensor& tensor);
  // "shape [2, 3], elements by rank [6, 4]", where ranks have different numbers in such a list.
  ShapeText(const at::Tensor& tensor, at::TensorList of_ranks);
  std::string_view view() const { return {text_.data(), length_}; }

 private:
  void put(std::string_view text);
  void put(int64_t number);
  std::array<char, 63> text_;
  size_t length_ = 0;
};

}  // namespace opensmd
