// Every collective of c10d::Backend over the transport. Each has a checking half, which runs in the calling thread,
// and a run_ half, which runs in its turn and does the moving.
#include "torch/backend.hpp"

#include <ATen/ATen.h>

#include <utility>

namespace opensmd {
namespace {

using Milliseconds = std::chrono::milliseconds;

const at::Tensor& only(const Tensors& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "smddp: ", operation, " takes one tensor a rank, but got ", tensors.size());
  return tensors[0];
}

void require_dense(const at::Tensor& tensor, const char* operation) {
  require_cpu(tensor, operation);
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "smddp: ", operation, " takes dense tensors, but got ",
                    tensor.layout(), "; only all_reduce takes sparse ones");
  require_memory(tensor, operation);
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

// The tensor forms follow NCCL's rule: numbers of elements decide, shapes do not matter.
void check_whole(const at::Tensor& whole, const at::Tensor& part, int size, const char* operation) {
  require_dense(whole, operation);
  require_dense(part, operation);
  require_same_dtype(whole, part, operation);
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size, "smddp: ", operation, " got tensors of ", whole.numel(),
                    " and ", part.numel(), " elements; in a group of ", size,
                    " ranks the one must have ", size, " times the elements of the other");
}

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

std::vector<size_t> counts_of(const Tensors& tensors, size_t units) {
  std::vector<size_t> counts;
  counts.reserve(tensors.size());
  for (const auto& tensor : tensors) counts.push_back(static_cast<size_t>(tensor.numel()) * units);
  return counts;
}

// Where each rank's part of one run of memory begins.
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

template <typename Pointer>
void* const* as_outputs(const std::vector<Pointer>& all) {
  return reinterpret_cast<void* const*>(all.data());
}

template <typename Pointer>
const void* const* as_inputs(const std::vector<Pointer>& all) {
  return reinterpret_cast<const void* const*>(all.data());
}

}  // namespace

// ---------------------------------------------------------------- broadcast and reductions

WorkPtr SmddpBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const auto& tensor = only(tensors, "broadcast");
  if (!tensor.is_cpu()) return device_collectives()->broadcast(tensors, opts);
  require_dense(tensor, "broadcast");
  return issue(c10d::OpType::BROADCAST, "smddp:broadcast", opts.asyncOp, tensors, tensors,
               [this, tensor, root = static_cast<int>(opts.rootRank), timeout = opts.timeout] {
                 ShapeText text(tensor);
                 Flat flat(tensor, rank_ == root ? Flat::Use::Read : Flat::Use::Write);
                 auto as = moved_as(tensor.scalar_type());
                 transport_->broadcast(flat.data(), flat.numel() * as.units, as.dtype, root, call(text, timeout));
                 flat.finish();
               });
}

WorkPtr SmddpBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = only(tensors, "all_reduce");
  if (!tensor.is_cpu()) return device_collectives()->allreduce(tensors, opts);
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  require_dense(tensor, "all_reduce");
  auto how = reducing(opts.reduceOp);
  return issue(c10d::OpType::ALLREDUCE, "smddp:all_reduce", opts.asyncOp, tensors, tensors,
               [this, tensor, how, timeout = opts.timeout] { run_all_reduce(tensor, how, timeout); });
}

void SmddpBackend::run_all_reduce(const at::Tensor& tensor, const Reducing& how, Milliseconds timeout) {
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

void SmddpBackend::run_all_reduce_coalesced(const Tensors& tensors, const Reducing& how, Milliseconds timeout) {
  for (const auto& tensor : tensors) run_all_reduce(tensor, how, timeout);
}

WorkPtr SmddpBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const auto& tensor = only(tensors, "reduce");
  if (!tensor.is_cpu()) return device_collectives()->reduce(tensors, opts);
  require_dense(tensor, "reduce");
  return issue(c10d::OpType::REDUCE, "smddp:reduce", opts.asyncOp, tensors, tensors,
               [this, tensor, how = reducing(opts.reduceOp), root = static_cast<int>(opts.rootRank),
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

void SmddpBackend::run_all_gather(const Tensors& outputs, const at::Tensor& input, Milliseconds timeout) {
  ShapeText text(input);
  auto as = moved_as(input.scalar_type());
  Flat in(input, Flat::Use::Read);
  auto outs = flats(outputs, Flat::Use::Write);
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

void SmddpBackend::run_all_gather_into(const at::Tensor& output, const at::Tensor& input, Milliseconds timeout) {
  ShapeText text(input);
  auto as = moved_as(input.scalar_type());
  Flat in(input, Flat::Use::Read);
  Flat out(output, Flat::Use::Write);
  std::vector<size_t> counts(static_cast<size_t>(size_), in.numel() * as.units);
  auto outs = slices(out.data(), counts, as.dtype);
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
               [this, output, input, root = static_cast<int>(opts.rootRank), timeout = opts.timeout] {
                 ShapeText text(input);
                 auto as = moved_as(input.scalar_type());
                 Flat in(input, Flat::Use::Read);
                 auto outs = flats(output, Flat::Use::Write);
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
               [this, output, input, root = static_cast<int>(opts.rootRank), timeout = opts.timeout] {
                 ShapeText text(output);
                 auto as = moved_as(output.scalar_type());
                 Flat out(output, Flat::Use::Write);
                 auto ins = flats(input, Flat::Use::Read);
                 auto from = pointers(ins);
                 transport_->scatter(from.empty() ? nullptr : as_inputs(from), out.data(), out.numel() * as.units,
                                     as.dtype, root, call(text, timeout));
                 out.finish();
               });
}

// ---------------------------------------------------------------- reduce_scatter

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
                                      Milliseconds timeout) {
  ShapeText text(output);
  auto as = reduced_as(output.scalar_type(), how.reduction);
  Flat out(output, Flat::Use::Write);
  auto ins = flats(inputs, Flat::Use::Read);
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
                                           Milliseconds timeout) {
  ShapeText text(output);
  auto as = reduced_as(output.scalar_type(), how.reduction);
  Flat out(output, Flat::Use::Write);
  Flat in(input, Flat::Use::Read);
  std::vector<size_t> counts(static_cast<size_t>(size_), out.numel() * as.units);
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

// ---------------------------------------------------------------- all_to_all

WorkPtr SmddpBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  require_count(inputs.size(), static_cast<size_t>(size_), "inputs (one a rank)", "all_to_all");
  if (!inputs[0].is_cpu()) return device_collectives()->alltoall(outputs, inputs, opts);
  check_list(inputs, inputs[0], size_, "all_to_all");
  check_list(outputs, inputs[0], size_, "all_to_all");
  return issue(c10d::OpType::ALLTOALL, "smddp:all_to_all", opts.asyncOp, outputs, inputs,
               [this, outputs, inputs, timeout = opts.timeout] { run_all_to_all(outputs, inputs, timeout); });
}

void SmddpBackend::run_all_to_all(const Tensors& outputs, const Tensors& inputs, Milliseconds timeout) {
  ShapeText text(inputs[0]);
  auto as = moved_as(inputs[0].scalar_type());
  auto ins = flats(inputs, Flat::Use::Read);
  auto outs = flats(outputs, Flat::Use::Write);
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
                 const bool overlaps = output.storage().is_alias_of(input.storage());
                 Flat in(overlaps ? input.clone() : input, Flat::Use::Read);
                 Flat out(output, Flat::Use::Write);
                 auto ins = slices(in.data(), in_counts, as.dtype);
                 auto outs = slices(out.data(), out_counts, as.dtype);
                 transport_->all_to_all(as_inputs(ins), in_counts.data(), as_outputs(outs), out_counts.data(),
                                        as.dtype, call(text, timeout));
                 out.finish();
               });
}

}  // namespace opensmd
