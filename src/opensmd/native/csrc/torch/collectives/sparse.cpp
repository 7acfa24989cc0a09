// all_reduce of sparse tensors: every rank gathers all rows and adds them up in rank order.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>

#include "torch/backend.hpp"
#include "torch/collectives/checks.hpp"
#include "torch/collectives/lists.hpp"

namespace opensmd {
namespace {

constexpr int64_t kMostAxes = 64;

// What ranks tell each other about their tensors: entries, dtype, sparse axes, axes and their extents.
enum : int64_t { kEntries, kDtype, kSparseAxes, kAxes, kExtents, kColumns = kExtents + kMostAxes };

at::Tensor described(const at::Tensor& tensor) {
  auto row = at::zeros({kColumns}, at::kLong);
  auto* column = row.mutable_data_ptr<int64_t>();
  column[kEntries] = tensor._nnz();
  column[kDtype] = static_cast<int64_t>(tensor.scalar_type());
  column[kSparseAxes] = tensor.sparse_dim();
  column[kAxes] = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), column + kExtents);
  return row;
}

std::string words(const int64_t* row) {
  return c10::str(static_cast<at::ScalarType>(row[kDtype]), " of shape ",
                  at::IntArrayRef(row + kExtents, static_cast<size_t>(row[kAxes])), " and sparse_dim ",
                  row[kSparseAxes]);
}

// Every rank has all rows, so all throw or none does, and the group goes on.
void require_alike(const at::Tensor& rows, const std::string& name, int rank) {
  const auto* first = rows.const_data_ptr<int64_t>();
  const auto* own = first + rank * kColumns;
  for (int64_t other = 0; other < rows.size(0); ++other) {
    const auto* row = first + other * kColumns;
    TORCH_CHECK_WITH(DistBackendError, std::equal(row + kDtype, row + kColumns, own + kDtype),
                     "smddp: all_reduce got sparse tensors that do not fit together: ", words(own), " on ", name,
                     ", but ", words(row), " on rank ", other, " of the group");
  }
}

}  // namespace

WorkPtr SmddpBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const auto& tensor = only(tensors, "all_reduce");
  if (!tensor.is_cpu()) return device_collectives()->allreduce_sparse(tensors, opts);
  auto how = reducing(opts.reduceOp);
  TORCH_CHECK_VALUE(how.reduction == Reduction::Sum, "smddp: all_reduce of sparse tensors can only sum, but got ",
                    name_of(how.reduction), "; use tensor.to_dense() for others");
  TORCH_CHECK_VALUE(tensor.dim() <= kMostAxes, "smddp: all_reduce takes sparse tensors of at most ", kMostAxes,
                    " axes, but got one of ", tensor.dim());
  return issue(c10d::OpType::_ALLREDUCE_SPARSE, "smddp:all_reduce_sparse", opts.asyncOp, tensors, tensors,
               [this, tensor, timeout = opts.timeout] { run_all_reduce_sparse(tensor, timeout); });
}

void SmddpBackend::run_all_reduce_sparse(const at::Tensor& tensor, std::chrono::milliseconds timeout) {
  c10::InferenceMode as_made(tensor.is_inference());  // as in write_back; coalesce() needs it, too
  c10::NoGradGuard no_grad;
  auto own = tensor.coalesce();
  auto all = at::empty({size_, kColumns}, at::kLong);
  const std::vector<size_t> columns(static_cast<size_t>(size_), kColumns);
  const auto text = c10::str("of the entries in all_reduce of a sparse tensor of shape ", tensor.sizes());
  transport_->all_gather(described(own).const_data_ptr(), as_outputs(slices(all.data_ptr(), columns, DType::I64)),
                         columns.data(), DType::I64, {text, timeout.count() > 0 ? timeout : timeout_.load()});
  require_alike(all, name_, rank_);
  auto entries = all.select(1, kEntries).contiguous();
  std::vector<int64_t> rows(entries.data_ptr<int64_t>(), entries.data_ptr<int64_t>() + size_);
  // Indices are stored one column per entry; here entries must be rows.
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
