// Collectives that move elements unchanged, in two halves as in reductions.cpp.
#include <ATen/ATen.h>

#include <utility>

#include "torch/backend.hpp"
#include "torch/collectives/checks.hpp"
#include "torch/collectives/in_place.hpp"
#include "torch/collectives/lists.hpp"

namespace opensmd {
namespace {

// How many core elements of the tensor, `units` for each of its own, go to or come from each rank.
std::vector<size_t> counts_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                   size_t units, const char* which) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const size_t row = rows == 0 ? 0 : static_cast<size_t>(tensor.numel() / rows) * units;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % size == 0, "smddp: all_to_all_single without split sizes divides the first dimension of ",
                      which, " among ", size, " ranks, but it has ", rows, " rows");
    return std::vector<size_t>(static_cast<size_t>(size), static_cast<size_t>(rows / size) * row);
  }
  require_count(splits.size(), static_cast<size_t>(size), "split sizes", "all_to_all_single");
  std::vector<size_t> counts;
  counts.reserve(splits.size());
  int64_t sum = 0;
  for (int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "smddp: all_to_all_single got a negative split size for ", which);
    sum += split;
    counts.push_back(static_cast<size_t>(split) * row);
  }
  TORCH_CHECK_VALUE(sum == rows, "smddp: the split sizes of ", which, " add up to ", sum, ", but it has ", rows,
                    " rows in its first dimension");
  return counts;
}

}  // namespace

WorkPtr SmddpBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto& tensor = only(tensors, "broadcast");
  if (!tensor.is_cpu()) return device_collectives()->broadcast(tensors, opts);
  require_dense(tensor, "broadcast");
  return issue(c10d::OpType::BROADCAST, "smddp:broadcast", opts.asyncOp, tensors, tensors,
               [this, tensor, root = narrowed(opts.rootRank), timeout = opts.timeout] {
                 ShapeText text(tensor);
                 Flat flat(tensor, rank_ == root ? Flat::Use::Read : Flat::Use::Write);
                 auto as = moved_as(tensor.scalar_type());
                 transport_->broadcast(flat.data(), flat.numel() * as.units, as.dtype, root, call(text, timeout));
                 flat.finish();
               });
}

// ---------------------------------------------------------------- all_gather

WorkPtr SmddpBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const auto& input = only(inputs, "all_gather");
  if (!input.is_cpu()) return device_collectives()->allgather(outputs, inputs, opts);
  require_dense(input, "all_gather");
  require_count(outputs.size(), 1, "lists of outputs", "all_gather");
  check_list(outputs[0], input, size_, "all_gather");
  require_count(static_cast<size_t>(outputs[0][rank_].numel()), static_cast<size_t>(input.numel()),
                "elements in the output for this rank (those of its input)", "all_gather");
  return issue(c10d::OpType::ALLGATHER, "smddp:all_gather", opts.asyncOp, outputs[0], inputs,
               [this, output = outputs[0], input, timeout = opts.timeout] { run_all_gather(output, input, timeout); });
}

void SmddpBackend::run_all_gather(const Tensors& outputs, const at::Tensor& input, std::chrono::milliseconds timeout) {
  ShapeText text(input, outputs);
  auto as = moved_as(input.scalar_type());
  Flat in(input, Flat::Use::Read);
  auto outs = flats(outputs, Flat::Use::Write);
  set_apart(in, outs, rank_);
  auto counts = counts_of(outputs, as.units);
  transport_->all_gather(in.data(), pointers(outs).data(), counts.data(), as.dtype, call(text, timeout));
  finish(outs);
}

WorkPtr SmddpBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  if (!input.is_cpu()) {
    require_on_device(output, "all_gather_into_tensor");
    return device_collectives()->_allgather_base(output, input, opts);
  }
  check_whole(output, input, size_, "all_gather_into_tensor");
  return issue(c10d::OpType::_ALLGATHER_BASE, "smddp:all_gather_into_tensor", opts.asyncOp, {output}, input,
               [this, output, input, timeout = opts.timeout] { run_all_gather_into(output, input, timeout); });
}

void SmddpBackend::run_all_gather_into(const at::Tensor& output, const at::Tensor& input,
                                       std::chrono::milliseconds timeout) {
  ShapeText text(input);
  auto as = moved_as(input.scalar_type());
  Flat in(input, Flat::Use::Read);
  Flat out(output, Flat::Use::Write);
  std::vector<size_t> counts(static_cast<size_t>(size_), in.numel() * as.units);
  auto outs = slices(out.data(), counts, as.dtype);
  set_apart(in, out, outs[static_cast<size_t>(rank_)]);
  transport_->all_gather(in.data(), as_outputs(outs), counts.data(), as.dtype, call(text, timeout));
  out.finish();
}

// outputs[rank][i] takes inputs[i] of that rank.
WorkPtr SmddpBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(!inputs.empty(), "smddp: all_gather_coalesced got no tensors");
  if (!inputs[0].is_cpu()) return device_collectives()->allgather_coalesced(outputs, inputs, opts);
  require_count(outputs.size(), static_cast<size_t>(size_), "lists of outputs (one a rank)", "all_gather_coalesced");
  for (const auto& input : inputs) require_dense(input, "all_gather_coalesced");
  std::vector<Tensors> by_input(inputs.size());
  Tensors all;
  for (const auto& of_rank : outputs) {
    require_count(of_rank.size(), inputs.size(), "outputs in a list (one an input)", "all_gather_coalesced");
    for (size_t i = 0; i < of_rank.size(); ++i) {
      require_dense(of_rank[i], "all_gather_coalesced");
      require_same_dtype(of_rank[i], inputs[i], "all_gather_coalesced");
      by_input[i].push_back(of_rank[i]);
      all.push_back(of_rank[i]);
    }
  }
  return issue(c10d::OpType::ALLGATHER_COALESCED, "smddp:all_gather_coalesced", opts.asyncOp, all, inputs,
               [this, by_input, inputs, timeout = opts.timeout] {
                 for (size_t i = 0; i < inputs.size(); ++i) run_all_gather(by_input[i], inputs[i], timeout);
               });
}

WorkPtr SmddpBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  require_count(outputs.size(), inputs.size(), "outputs (one an input)", "all_gather_into_tensor_coalesced");
  if (!inputs.empty() && !inputs[0].is_cpu()) {
    require_on_device(outputs, "all_gather_into_tensor_coalesced");
    require_on_device(inputs, "all_gather_into_tensor_coalesced");
    return device_collectives()->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(outputs[i], inputs[i], size_, "all_gather_into_tensor_coalesced");
  }
  return issue(c10d::OpType::COALESCED, "smddp:all_gather_into_tensor_coalesced", opts.asyncOp, outputs, inputs,
               [this, outputs, inputs, timeout = opts.timeout] {
                 for (size_t i = 0; i < inputs.size(); ++i) run_all_gather_into(outputs[i], inputs[i], timeout);
               });
}

// ---------------------------------------------------------------- gather and scatter

WorkPtr SmddpBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const auto& input = only(inputs, "gather");
  if (!input.is_cpu()) return device_collectives()->gather(outputs, inputs, opts);
  require_dense(input, "gather");
  Tensors output;
  if (rank_ == opts.rootRank) {
    require_count(outputs.size(), 1, "lists of outputs", "gather");
    output = outputs[0];
    check_list(output, input, size_, "gather");
    for (const auto& each : output) {
      require_count(static_cast<size_t>(each.numel()), static_cast<size_t>(input.numel()),
                    "elements in an output (those of the input)", "gather");
    }
  } else {
    require_count(outputs.size(), 0, "lists of outputs on a rank that is not the destination", "gather");
  }
  return issue(c10d::OpType::GATHER, "smddp:gather", opts.asyncOp, output, inputs,
               [this, output, input, root = narrowed(opts.rootRank), timeout = opts.timeout] {
                 ShapeText text(input);
                 auto as = moved_as(input.scalar_type());
                 Flat in(input, Flat::Use::Read);
                 auto outs = flats(output, Flat::Use::Write);
                 set_apart(in, outs, root);
                 auto to = pointers(outs);
                 transport_->gather(in.data(), to.empty() ? nullptr : to.data(), in.numel() * as.units, as.dtype,
                                    root, call(text, timeout));
                 finish(outs);
               });
}

WorkPtr SmddpBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  const auto& output = only(outputs, "scatter");
  if (!output.is_cpu()) return device_collectives()->scatter(outputs, inputs, opts);
  require_dense(output, "scatter");
  Tensors input;
  if (rank_ == opts.rootRank) {
    require_count(inputs.size(), 1, "lists of inputs", "scatter");
    input = inputs[0];
    check_list(input, output, size_, "scatter");
    for (const auto& each : input) {
      require_count(static_cast<size_t>(each.numel()), static_cast<size_t>(output.numel()),
                    "elements in an input (those of the output)", "scatter");
    }
  } else {
    require_count(inputs.size(), 0, "lists of inputs on a rank that is not the source", "scatter");
  }
  return issue(c10d::OpType::SCATTER, "smddp:scatter", opts.asyncOp, outputs, input,
               [this, output, input, root = narrowed(opts.rootRank), timeout = opts.timeout] {
                 ShapeText text(output);
                 auto as = moved_as(output.scalar_type());
                 Flat out(output, Flat::Use::Write);
                 auto ins = flats(input, Flat::Use::Read);
                 set_apart(ins, out, root);
                 auto from = pointers(ins);
                 transport_->scatter(from.empty() ? nullptr : as_inputs(from), out.data(), out.numel() * as.units,
                                     as.dtype, root, call(text, timeout));
                 out.finish();
               });
}

// ---------------------------------------------------------------- all_to_all

WorkPtr SmddpBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  require_count(inputs.size(), static_cast<size_t>(size_), "inputs (one a rank)", "all_to_all");
  if (!inputs[0].is_cpu()) return device_collectives()->alltoall(outputs, inputs, opts);
  check_list(inputs, inputs[0], size_, "all_to_all");
  check_list(outputs, inputs[0], size_, "all_to_all");
  return issue(c10d::OpType::ALLTOALL, "smddp:all_to_all", opts.asyncOp, outputs, inputs,
               [this, outputs, inputs, timeout = opts.timeout] { run_all_to_all(outputs, inputs, timeout); });
}

void SmddpBackend::run_all_to_all(const Tensors& outputs, const Tensors& inputs, std::chrono::milliseconds timeout) {
  ShapeText text(inputs[0]);
  auto as = moved_as(inputs[0].scalar_type());
  auto ins = flats(inputs, Flat::Use::Read);
  auto outs = flats(outputs, Flat::Use::Write);
  for (auto& in : ins) {
    for (const auto& out : outs) set_apart(in, out, nullptr);
  }
  auto in_counts = counts_of(inputs, as.units);
  auto out_counts = counts_of(outputs, as.units);
  transport_->all_to_all(as_inputs(pointers(ins)), in_counts.data(), pointers(outs).data(), out_counts.data(),
                         as.dtype, call(text, timeout));
  finish(outs);
}

WorkPtr SmddpBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  if (!input.is_cpu()) {
    require_on_device(output, "all_to_all_single");
    return device_collectives()->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  require_dense(output, "all_to_all_single");
  require_dense(input, "all_to_all_single");
  require_same_dtype(output, input, "all_to_all_single");
  const auto as = moved_as(input.scalar_type());
  auto out_counts = counts_of_rows(output, output_splits, size_, as.units, "the output");
  auto in_counts = counts_of_rows(input, input_splits, size_, as.units, "the input");
  return issue(c10d::OpType::ALLTOALL_BASE, "smddp:all_to_all_single", opts.asyncOp, {output}, input,
               [this, output, input, as, out_counts = std::move(out_counts), in_counts = std::move(in_counts),
                timeout = opts.timeout] {
                 ShapeText text(input);
                 Flat in(input, Flat::Use::Read);
                 Flat out(output, Flat::Use::Write);
                 set_apart(in, out, nullptr);
                 auto ins = slices(in.data(), in_counts, as.dtype);
                 auto outs = slices(out.data(), out_counts, as.dtype);
                 transport_->all_to_all(as_inputs(ins), in_counts.data(), as_outputs(outs), out_counts.data(),
                                        as.dtype, call(text, timeout));
                 out.finish();
               });
}

}  // namespace opensmd
