// all_reduce of sparse tensors: everybody gathers everybody's rows and adds them up in the order of ranks.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "torch/backend.hpp"
#include "torch/collectives/checks.hpp"

namespace opensmd {

WorkPtr SmddpBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = only(tensors, "all_reduce");
  if (!tensor.is_cpu()) return device_collectives()->allreduce_sparse(tensors, opts);
  auto how = reducing(opts.reduceOp);
  TORCH_CHECK_VALUE(how.reduction == Reduction::Sum, "smddp: all_reduce of sparse tensors can only sum, but got ",
                    name_of(how.reduction), "; use tensor.to_dense() for others");
  return issue(c10d::OpType::_ALLREDUCE_SPARSE, "smddp:all_reduce_sparse", opts.asyncOp, tensors, tensors,
               [this, tensor, timeout = opts.timeout] { run_all_reduce_sparse(tensor, timeout); });
}

void SmddpBackend::run_all_reduce_sparse(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
  c10::InferenceMode as_made(tensor.is_inference());  // as in write_back, and coalesce() asks for it, too
  c10::NoGradGuard no_grad;
  auto own = tensor.coalesce();
  auto counts = at::empty({size_}, at::kLong);
  run_all_gather_into(counts, at::full({1}, own._nnz(), at::kLong), timeout);
  std::vector<int64_t> rows(counts.data_ptr<int64_t>(), counts.data_ptr<int64_t>() + size_);
  // Indices are stored one column an entry; entries are to be the rows here.
  auto indices = gather_rows(own._indices().t().contiguous(), rows, timeout).t();
  auto values = gather_rows(own._values(), rows, timeout);
  auto sum = at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), tensor.options()).coalesce();
  tensor.copy_(sum);
}

at::Tensor SmddpBackend::gather_rows(const at::Tensor& rows, const std::vector<int64_t>& counts,
                                     std::chrono::milliseconds timeout) {
  auto sizes = rows.sizes().vec();
  sizes[0] = 0;
  for (int64_t count : counts) sizes[0] += count;
  auto all = at::empty(sizes, rows.options());
  run_all_gather(all.split_with_sizes(counts), rows, timeout);
  return all;
}

}  // namespace opensmd
