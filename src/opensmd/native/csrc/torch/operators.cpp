// torch.ops.opensmd: collectives as operators of torch, which torch.compile takes into its graphs, and which cost less
// than torch.distributed's functions: no Python between the caller and the group.
//
// They write to their first argument and return nothing, as torch.compile wants it of operators that write. The group
// goes by its name, which a graph can hold.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>

#include <array>
#include <string>
#include <utility>

#include "torch/backend.hpp"

namespace opensmd {
namespace {

using c10d::ReduceOp;

ReduceOp reduce_op(c10::string_view name) {
  static const std::array<std::pair<c10::string_view, ReduceOp::RedOpType>, 8> kNames{{{"sum", ReduceOp::SUM},
                                                                                       {"avg", ReduceOp::AVG},
                                                                                       {"product", ReduceOp::PRODUCT},
                                                                                       {"min", ReduceOp::MIN},
                                                                                       {"max", ReduceOp::MAX},
                                                                                       {"band", ReduceOp::BAND},
                                                                                       {"bor", ReduceOp::BOR},
                                                                                       {"bxor", ReduceOp::BXOR}}};
  for (const auto& [known, op] : kNames) {
    if (name == known) return op;
  }
  C10_THROW_ERROR(ValueError, c10::str("smddp: op is '", name,
                                       "', but there are sum, avg, product, min, max, band, bor and bxor"));
}

BackendPtr backend_of(c10::string_view group, const at::Tensor& tensor) {
  return c10d::resolve_process_group(std::string(group))->getBackend(tensor.device().type());
}

// Groups of other backends return handles from sync calls, too.
void finish(const WorkPtr& work) {
  if (work) work->wait();
}

void all_reduce_(at::Tensor tensor, c10::string_view op, c10::string_view group) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(op);
  options.asyncOp = false;
  Tensors tensors{std::move(tensor)};
  finish(backend_of(group, tensors[0])->allreduce(tensors, options));
}

void broadcast_(at::Tensor tensor, int64_t root, c10::string_view group) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = false;
  Tensors tensors{std::move(tensor)};
  finish(backend_of(group, tensors[0])->broadcast(tensors, options));
}

void all_gather_into_(at::Tensor output, at::Tensor input, c10::string_view group) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  finish(backend_of(group, input)->_allgather_base(output, input, options));
}

void reduce_scatter_into_(at::Tensor output, at::Tensor input, c10::string_view op, c10::string_view group) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(op);
  options.asyncOp = false;
  finish(backend_of(group, input)->_reduce_scatter_base(output, input, options));
}

void all_to_all_into_(at::Tensor output, at::Tensor input, c10::string_view group) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  std::vector<int64_t> even;
  finish(backend_of(group, input)->alltoall_base(output, input, even, even, options));
}

TORCH_LIBRARY(opensmd, library) {
  library.def("all_reduce_(Tensor(a!) tensor, str op, str group) -> ()");
  library.def("broadcast_(Tensor(a!) tensor, int root, str group) -> ()");
  library.def("all_gather_into_(Tensor(a!) output, Tensor input, str group) -> ()");
  library.def("reduce_scatter_into_(Tensor(a!) output, Tensor input, str op, str group) -> ()");
  library.def("all_to_all_into_(Tensor(a!) output, Tensor input, str group) -> ()");
}

TORCH_LIBRARY_IMPL(opensmd, CompositeExplicitAutograd, library) {
  library.impl("all_reduce_", all_reduce_);
  library.impl("broadcast_", broadcast_);
  library.impl("all_gather_into_", all_gather_into_);
  library.impl("reduce_scatter_into_", reduce_scatter_into_);
  library.impl("all_to_all_into_", all_to_all_into_);
}

// Of tensors without data, while torch.compile traces: nothing happens, since nothing is returned.
TORCH_LIBRARY_IMPL(opensmd, Meta, library) {
  library.impl("all_reduce_", [](at::Tensor, c10::string_view, c10::string_view) {});
  library.impl("broadcast_", [](at::Tensor, int64_t, c10::string_view) {});
  library.impl("all_gather_into_", [](at::Tensor, at::Tensor, c10::string_view) {});
  library.impl("reduce_scatter_into_", [](at::Tensor, at::Tensor, c10::string_view, c10::string_view) {});
  library.impl("all_to_all_into_", [](at::Tensor, at::Tensor, c10::string_view) {});
}

}  // namespace
}  // namespace opensmd
