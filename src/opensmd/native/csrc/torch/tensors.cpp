#include "torch/tensors.hpp"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace opensmd {
namespace {

std::optional<DType> core_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::F32;
    case at::kDouble: return DType::F64;
    case at::kHalf: return DType::F16;
    case at::kBFloat16: return DType::BF16;
    case at::kChar: return DType::I8;
    case at::kShort: return DType::I16;
    case at::kInt: return DType::I32;
    case at::kLong: return DType::I64;
    case at::kByte: return DType::U8;
    case at::kUInt16: return DType::U16;
    case at::kUInt32: return DType::U32;
    case at::kUInt64: return DType::U64;
    case at::kBool: return DType::Bool;
    case at::kComplexFloat: return DType::C64;
    case at::kComplexDouble: return DType::C128;
    case at::kFloat8_e4m3fn: return DType::F8E4M3FN;
    case at::kFloat8_e5m2: return DType::F8E5M2;
    case at::kFloat8_e4m3fnuz: return DType::F8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz: return DType::F8E5M2FNUZ;
    default: return std::nullopt;
  }
}

bool adds_parts(Reduction reduction) {
  return reduction == Reduction::Sum || reduction == Reduction::Average || reduction == Reduction::PremulSum;
}

// What to convert to: integers for bitwise reductions, floats for everything else.
const char* way_out(Reduction reduction) {
  bool bits = reduction == Reduction::BitAnd || reduction == Reduction::BitOr || reduction == Reduction::BitXor;
  return bits ? "tensor.view(torch.uint8) for the bits as they are, or tensor.long() for the numbers"
              : "tensor.float()";
}

}  // namespace

Elements moved_as(at::ScalarType type) {
  if (auto dtype = core_dtype(type)) return {*dtype, 1};
  return {DType::Byte, c10::elementSize(type)};
}

Elements reduced_as(at::ScalarType type, Reduction reduction) {
  if (type == at::kComplexHalf && adds_parts(reduction)) return {DType::F16, 2};
  auto dtype = core_dtype(type);
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype && reducible(*dtype, reduction), "smddp: there is no reduction ", name_of(reduction), " for ", type,
      " tensors; convert them first, for example with ", way_out(reduction));
  return {*dtype, 1};
}

Reducing reducing(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return {Reduction::Sum, 1.0};
    case c10d::ReduceOp::AVG: return {Reduction::Average, 1.0};
    case c10d::ReduceOp::PRODUCT: return {Reduction::Product, 1.0};
    case c10d::ReduceOp::MIN: return {Reduction::Min, 1.0};
    case c10d::ReduceOp::MAX: return {Reduction::Max, 1.0};
    case c10d::ReduceOp::BAND: return {Reduction::BitAnd, 1.0};
    case c10d::ReduceOp::BOR: return {Reduction::BitOr, 1.0};
    case c10d::ReduceOp::BXOR: return {Reduction::BitXor, 1.0};
    case c10d::ReduceOp::PREMUL_SUM: {
      auto* premul = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK_VALUE(premul != nullptr, "smddp: PREMUL_SUM needs a factor; make it with _make_nccl_premul_sum");
      const auto& tensor = premul->tensor_factor;
      return {Reduction::PremulSum, tensor.defined() ? tensor.item<double>() : premul->double_factor};
    }
    default: TORCH_CHECK_VALUE(false, "smddp: unknown reduction ", static_cast<int>(op.op_));
  }
}

size_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return 0;
  if (tensor.layout() == at::kSparse) return tensor._indices().nbytes() + tensor._values().nbytes();
  return tensor.layout() == at::kStrided ? tensor.nbytes() : 0;
}

void require_memory(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_VALUE(tensor.numel() == 0 || tensor.storage().data() != nullptr, "smddp: ", operation,
                    " got a tensor of ", tensor.sizes(), " whose memory was freed (its storage has 0 bytes)");
}

void require_cpu(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), "smddp: ", operation, " got tensors on cpu and on ", tensor.device(),
                    "; all must be on one device");
}

void require_on_device(at::TensorList tensors, const char* operation) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(!tensor.is_cpu(), "smddp: ", operation,
                      " got tensors on a device and on cpu; all must be on one device");
  }
}

void write_back(const at::Tensor& tensor, const at::Tensor& from) {
  c10::InferenceMode as_made(tensor.is_inference());  // such a tensor is writable only in this mode
  c10::NoGradGuard no_grad;
  tensor.copy_(from);
}

Flat::Flat(at::Tensor tensor, Use use) : tensor_(std::move(tensor)), use_(use) {
  if (tensor_.is_contiguous() && !tensor_.is_conj() && !tensor_.is_neg()) {
    flat_ = tensor_;
  } else if (use_ == Use::Write) {
    flat_ = at::empty(tensor_.sizes(), tensor_.options().memory_format(at::MemoryFormat::Contiguous));
  } else {
    flat_ = tensor_.resolve_conj().resolve_neg().contiguous();
  }
}

bool Flat::overlaps(const Flat& other) const {
  const auto* mine = static_cast<const char*>(flat_.const_data_ptr());
  const auto* theirs = static_cast<const char*>(other.flat_.const_data_ptr());
  return mine < theirs + other.flat_.nbytes() && theirs < mine + flat_.nbytes();
}

void Flat::copy() { flat_ = flat_.clone(); }

void Flat::finish() {
  if (use_ == Use::Read || flat_.is_same(tensor_)) return;
  write_back(tensor_, flat_);
}

std::vector<Flat> flats(const std::vector<at::Tensor>& tensors, Flat::Use use) {
  std::vector<Flat> all;
  all.reserve(tensors.size());
  for (const auto& tensor : tensors) all.emplace_back(tensor, use);
  return all;
}

std::vector<void*> pointers(const std::vector<Flat>& all) {
  std::vector<void*> found;
  found.reserve(all.size());
  for (const auto& flat : all) found.push_back(flat.data());
  return found;
}

void finish(std::vector<Flat>& all) {
  for (auto& flat : all) flat.finish();
}

ShapeText::ShapeText(const at::Tensor& tensor) {
  put("shape [");
  bool first = true;
  for (int64_t extent : tensor.sizes()) {
    if (!first) put(", ");
    put(extent);
    first = false;
  }
  put("]");
}

ShapeText::ShapeText(const at::Tensor& tensor, at::TensorList of_ranks) : ShapeText(tensor) {
  const auto differs = [&](const at::Tensor& each) { return each.numel() != tensor.numel(); };
  if (std::none_of(of_ranks.begin(), of_ranks.end(), differs)) return;
  put(", elements by rank [");
  for (size_t i = 0; i < of_ranks.size(); ++i) {
    if (i > 0) put(", ");
    put(of_ranks[i].numel());
  }
  put("]");
}

void ShapeText::put(int64_t number) {
  char digits[24];
  char* end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  put({digits, static_cast<size_t>(end - digits)});
}

void ShapeText::put(std::string_view text) {
  size_t room = text_.size() - length_;
  text = text.substr(0, room);
  text.copy(text_.data() + length_, text.size());
  length_ += text.size();
}

}  // namespace opensmd
