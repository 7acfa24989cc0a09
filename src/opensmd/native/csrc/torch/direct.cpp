#include "torch/direct.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/timeline/event_log.hpp"

namespace opensmd {
namespace {

using c10d::ReduceOp;

ReduceOp reduce_op(std::string_view name) {
  static const std::array<std::pair<std::string_view, ReduceOp::RedOpType>, 8> kNames{{{"sum", ReduceOp::SUM},
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

// A call, noted for the timeline where nothing else does it: smddp keeps its own record, NCCL reports all its work, and
// the operators of torch's dispatcher, which note the rest, are bypassed.
template <typename Start>
void call(const c10d::Backend& backend, const char* operation, const at::Tensor& output, Start start) {
  EventLog& log = EventLog::of_process();
  if (!log.on() || !output.is_cpu() || backend.getBackendName() == kBackendName) {
    if (const WorkPtr work = start()) work->wait();  // other backends return handles even from sync calls
    return;
  }
  const Event event = log.begin(backend.getGroupUid(), log.operation(operation), bytes_of(output));
  if (const WorkPtr work = start()) work->wait();
  log.end(event);
}

}  // namespace

void direct_all_reduce(c10d::Backend& backend, const at::Tensor& tensor, std::string_view op) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduce_op(op);
  options.asyncOp = false;
  Tensors tensors{tensor};
  call(backend, "all_reduce", tensor, [&] { return backend.allreduce(tensors, options); });
}

void direct_broadcast(c10d::Backend& backend, const at::Tensor& tensor, int64_t root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.asyncOp = false;
  Tensors tensors{tensor};
  call(backend, "broadcast", tensor, [&] { return backend.broadcast(tensors, options); });
}

void direct_all_gather(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  at::Tensor into = output, from = input;
  call(backend, "all_gather_into_tensor", into, [&] { return backend._allgather_base(into, from, options); });
}

void direct_reduce_scatter(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input, std::string_view op) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op(op);
  options.asyncOp = false;
  at::Tensor into = output, from = input;
  call(backend, "reduce_scatter_tensor", into, [&] { return backend._reduce_scatter_base(into, from, options); });
}

void direct_all_to_all(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input) {
  c10d::AllToAllOptions options;
  options.asyncOp = false;
  std::vector<int64_t> even;
  at::Tensor into = output, from = input;
  call(backend, "all_to_all_single", into, [&] { return backend.alltoall_base(into, from, even, even, options); });
}

DirectGroup::DirectGroup(GroupPtr group) : group_(std::move(group)) {
  const auto devices = group_->getDeviceTypes();
  const bool has_cpu = std::find(devices.begin(), devices.end(), at::Device(at::kCPU)) != devices.end();
  if (has_cpu) cpu_ = group_->getBackend(at::kCPU);
}

c10d::Backend& DirectGroup::backend_for(const at::Tensor& tensor) const {
  if (cpu_ && tensor.is_cpu()) return *cpu_;
  return *group_->getBackend(tensor.device().type());  // which the group keeps alive
}

void DirectGroup::all_reduce(const at::Tensor& tensor, std::string_view op) const {
  direct_all_reduce(backend_for(tensor), tensor, op);
}

void DirectGroup::broadcast(const at::Tensor& tensor, int64_t root) const {
  direct_broadcast(backend_for(tensor), tensor, root);
}

void DirectGroup::all_gather(const at::Tensor& output, const at::Tensor& input) const {
  direct_all_gather(backend_for(input), output, input);
}

void DirectGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, std::string_view op) const {
  direct_reduce_scatter(backend_for(input), output, input, op);
}

void DirectGroup::all_to_all(const at::Tensor& output, const at::Tensor& input) const {
  direct_all_to_all(backend_for(input), output, input);
}

}  // namespace opensmd
