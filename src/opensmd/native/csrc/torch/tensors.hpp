// Between tensors and plain memory: dtypes, reductions, and tensors whose elements are not contiguous.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>
#include <vector>

#include "core/group.hpp"

namespace opensmd {

// How a tensor's elements travel: `units` core elements of `dtype` for each.
struct Elements {
  DType dtype;
  size_t units;
};

// For moving: dtypes unknown to the core are bytes.
Elements moved_as(at::ScalarType type);
// For reducing. Throws NotImplementedError, naming both, if the dtype has no such reduction.
Elements reduced_as(at::ScalarType type, Reduction reduction);

struct Reducing {
  Reduction reduction;
  double factor;
};

Reducing reducing(const c10d::ReduceOp& op);

// Throws ValueError for a tensor whose storage was freed (FSDP does so), which would crash the process.
void require_memory(const at::Tensor& tensor, const char* operation);

// For tensors after the first, whose device decides where a call goes. The core cannot read device memory; NCCL does
// not check all tensors of some calls, and its kernels would read invalid memory. Both throw ValueError.
void require_cpu(const at::Tensor& tensor, const char* operation);
void require_on_device(at::TensorList tensors, const char* operation);

// Of its values and, if it is sparse, its indices.
size_t bytes_of(const at::Tensor& tensor);

// Gives a tensor the elements of another, in any thread: it may lack the caller's autograd modes.
void write_back(const at::Tensor& tensor, const at::Tensor& from);

// A tensor as contiguous memory. One that is not is copied; finish() copies results back.
class Flat {
 public:
  enum class Use { Read, Write, ReadWrite };
  Flat(at::Tensor tensor, Use use);
  void* data() const { return flat_.data_ptr(); }
  size_t numel() const { return static_cast<size_t>(flat_.numel()); }
  bool overlaps(const Flat& other) const;
  void copy();  // read-only input, before others write into its memory
  void finish();

 private:
  at::Tensor tensor_;
  at::Tensor flat_;
  Use use_;
};

std::vector<Flat> flats(const std::vector<at::Tensor>& tensors, Flat::Use use);
std::vector<void*> pointers(const std::vector<Flat>& all);
void finish(std::vector<Flat>& all);

// "shape [2, 3]" for error messages, made without allocating, since every call writes it.
class ShapeText {
 public:
  explicit ShapeText(const at::Tensor& tensor);
  // "shape [2, 3], elements by rank [6, 4]", if the ranks' counts in such a list differ.
  ShapeText(const at::Tensor& tensor, at::TensorList of_ranks);
  std::string_view view() const { return {text_.data(), length_}; }

 private:
  void put(std::string_view text);
  void put(int64_t number);
  std::array<char, 63> text_;
  size_t length_ = 0;
};

}  // namespace opensmd
