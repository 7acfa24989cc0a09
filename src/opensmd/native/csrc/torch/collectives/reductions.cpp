// Collectives that reduce. Each has a checking half, which runs in the calling thread, and a run_ half, which moves the
// data in its turn.
#include <ATen/ATen.h>

#include "torch/backend.hpp"
#include "torch/collectives/checks.hpp"
#include "torch/collectives/in_place.hpp"
#include "torch/collectives/lists.hpp"

namespace opensmd {

WorkPtr SmddpBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = only(tensors, "all_reduce");
  if (!tensor.is_cpu()) return device_collectives()->allreduce(tensors, opts);
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  require_dense(tensor, "all_reduce");
  auto how = reducing(opts.reduceOp);
  return issue(c10d::OpType::ALLREDUCE, "smddp:all_reduce", opts.asyncOp, tensors, tensors,
               [this, tensor, how, timeout = opts.timeout] { run_all_reduce(tensor, how, timeout); });
}

void SmddpBackend::run_all_reduce(const at::Tensor& tensor, const Reducing& how, std::chrono::milliseconds timeout) {
  if (compresses(tensor, how.reduction)) {
    return run_all_reduce_compressed(tensor, how.reduction, options_->compression, std::nullopt, timeout);
  }
  ShapeText text(tensor);
  Flat flat(tensor, Flat::Use::ReadWrite);
  auto as = reduced_as(tensor.scalar_type(), how.reduction);
  transport_->all_reduce(flat.data(), flat.numel() * as.units, as.dtype, how.reduction, how.factor,
                         call(text, timeout));
  flat.finish();
}

WorkPtr SmddpBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "smddp: all_reduce_coalesced got no tensors");
  if (!tensors[0].is_cpu()) return device_collectives()->allreduce_coalesced(tensors, opts);
  for (const auto& tensor : tensors) require_dense(tensor, "all_reduce_coalesced");
  auto how = reducing(opts.reduceOp);
  return issue(c10d::OpType::ALLREDUCE_COALESCED, "smddp:all_reduce_coalesced", opts.asyncOp, tensors, tensors,
               [this, tensors, how, timeout = opts.timeout] { run_all_reduce_coalesced(tensors, how, timeout); });
}

void SmddpBackend::run_all_reduce_coalesced(const Tensors& tensors, const Reducing& how, std::chrono::milliseconds timeout) {
  for (const auto& tensor : tensors) run_all_reduce(tensor, how, timeout);
}

WorkPtr SmddpBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto& tensor = only(tensors, "reduce");
  if (!tensor.is_cpu()) return device_collectives()->reduce(tensors, opts);
  require_dense(tensor, "reduce");
  return issue(c10d::OpType::REDUCE, "smddp:reduce", opts.asyncOp, tensors, tensors,
               [this, tensor, how = reducing(opts.reduceOp), root = narrowed(opts.rootRank),
                timeout = opts.timeout] {
                 ShapeText text(tensor);
                 bool here = rank_ == root;
                 Flat flat(tensor, here ? Flat::Use::ReadWrite : Flat::Use::Read);
                 auto as = reduced_as(tensor.scalar_type(), how.reduction);
                 transport_->reduce(flat.data(), here ? flat.data() : nullptr, flat.numel() * as.units, as.dtype,
                                    how.reduction, root, how.factor, call(text, timeout));
                 flat.finish();
               });
}

WorkPtr SmddpBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) {
  const auto& output = only(outputs, "reduce_scatter");
  if (!output.is_cpu()) return device_collectives()->reduce_scatter(outputs, inputs, opts);
  require_dense(output, "reduce_scatter");
  require_count(inputs.size(), 1, "lists of inputs", "reduce_scatter");
  check_list(inputs[0], output, size_, "reduce_scatter");
  require_count(static_cast<size_t>(output.numel()), static_cast<size_t>(inputs[0][rank_].numel()),
                "elements in the output (those of this rank's input)", "reduce_scatter");
  return issue(c10d::OpType::REDUCE_SCATTER, "smddp:reduce_scatter", opts.asyncOp, outputs, inputs[0],
               [this, output, input = inputs[0], how = reducing(opts.reduceOp), timeout = opts.timeout] {
                 run_reduce_scatter(output, input, how, timeout);
               });
}

void SmddpBackend::run_reduce_scatter(const at::Tensor& output, const Tensors& inputs, const Reducing& how,
                                      std::chrono::milliseconds timeout) {
  ShapeText text(output, inputs);
  auto as = reduced_as(output.scalar_type(), how.reduction);
  Flat out(output, Flat::Use::Write);
  auto ins = flats(inputs, Flat::Use::Read);
  set_apart(ins, out, rank_);
  auto counts = counts_of(inputs, as.units);
  transport_->reduce_scatter(as_inputs(pointers(ins)), counts.data(), out.data(), as.dtype, how.reduction, how.factor,
                             call(text, timeout));
  out.finish();
}

WorkPtr SmddpBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) {
  if (!output.is_cpu()) {
    require_on_device(input, "reduce_scatter_tensor");
    return device_collectives()->_reduce_scatter_base(output, input, opts);
  }
  check_whole(input, output, size_, "reduce_scatter_tensor");
  return issue(c10d::OpType::_REDUCE_SCATTER_BASE, "smddp:reduce_scatter_tensor", opts.asyncOp, {output}, input,
               [this, output, input, how = reducing(opts.reduceOp), timeout = opts.timeout] {
                 run_reduce_scatter_from(output, input, how, timeout);
               });
}

void SmddpBackend::run_reduce_scatter_from(const at::Tensor& output, const at::Tensor& input, const Reducing& how,
                                           std::chrono::milliseconds timeout) {
  ShapeText text(output);
  auto as = reduced_as(output.scalar_type(), how.reduction);
  Flat out(output, Flat::Use::Write);
  Flat in(input, Flat::Use::Read);
  std::vector<size_t> counts(static_cast<size_t>(size_), out.numel() * as.units);
  const char* own = slices(in.data(), counts, as.dtype)[static_cast<size_t>(rank_)];
  if (out.data() != own) set_apart(in, out, nullptr);
  auto ins = slices(in.data(), counts, as.dtype);
  transport_->reduce_scatter(as_inputs(ins), counts.data(), out.data(), as.dtype, how.reduction, how.factor,
                             call(text, timeout));
  out.finish();
}

WorkPtr SmddpBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& opts) {
  require_count(outputs.size(), inputs.size(), "outputs (one an input)", "reduce_scatter_tensor_coalesced");
  if (!outputs.empty() && !outputs[0].is_cpu()) {
    require_on_device(outputs, "reduce_scatter_tensor_coalesced");
    require_on_device(inputs, "reduce_scatter_tensor_coalesced");
    return device_collectives()->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(inputs[i], outputs[i], size_, "reduce_scatter_tensor_coalesced");
  }
  return issue(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, "smddp:reduce_scatter_tensor_coalesced", opts.asyncOp,
               outputs, inputs, [this, outputs, inputs, how = reducing(opts.reduceOp), timeout = opts.timeout] {
                 for (size_t i = 0; i < inputs.size(); ++i) {
                   run_reduce_scatter_from(outputs[i], inputs[i], how, timeout);
                 }
               });
}

}  // namespace opensmd
