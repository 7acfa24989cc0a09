// Float32 sums and averages sent between hosts in fewer bytes, because a call or the whole group asks for it.
#include <ATen/ATen.h>

#include <string>

#include "torch/backend.hpp"

namespace opensmd {
namespace {

void require_compressible(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu(), "smddp: only CPU tensors are compressed between hosts, but this one is on ",
                              tensor.device());
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat,
                   "smddp: only float32 tensors are compressed between hosts, but this one is ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_contiguous(),
                    "smddp: only contiguous tensors are compressed between hosts; give tensor.contiguous()");
  require_memory(tensor, "all_reduce");
}

}  // namespace

bool SmddpBackend::compresses(const at::Tensor& tensor, Reduction reduction) const {
  return options_->compression != Compression::None && tensor.scalar_type() == at::kFloat &&
         (reduction == Reduction::Sum || reduction == Reduction::Average);
}

WorkPtr SmddpBackend::all_reduce_compressed(const at::Tensor& tensor, Reduction reduction, Compression compression,
                                            const std::optional<at::Tensor>& residual) {
  require_compressible(tensor);
  if (residual) {
    require_compressible(*residual);
    TORCH_CHECK_VALUE(residual->numel() == tensor.numel(), "smddp: the residual has ", residual->numel(),
                      " numbers, but the tensor that is reduced has ", tensor.numel());
  }
  return issue(c10d::OpType::ALLREDUCE, "smddp:all_reduce", true, {tensor}, tensor,
               [this, tensor, reduction, compression, residual] {
                 run_all_reduce_compressed(tensor, reduction, compression, residual, std::chrono::milliseconds{0});
               });
}

void SmddpBackend::run_all_reduce_compressed(const at::Tensor& tensor, Reduction reduction, Compression compression,
                                             const std::optional<at::Tensor>& residual, std::chrono::milliseconds timeout) {
  const ShapeText shape(tensor);
  const auto text = c10::str(shape.view(), ", ", name_of(compression), " between hosts");
  const at::NoGradGuard no_grad;
  if (residual) {
    tensor.add_(residual->view_as(tensor));
    residual->zero_();
  }
  Flat flat(tensor, Flat::Use::ReadWrite);
  transport_->all_reduce_compressed(static_cast<float*>(flat.data()), flat.numel(), reduction, compression,
                                    residual ? residual->mutable_data_ptr<float>() : nullptr,
                                    {text, timeout.count() > 0 ? timeout : timeout_.load()});
  flat.finish();
}

}  // namespace opensmd
