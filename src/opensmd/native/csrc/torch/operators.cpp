// torch.ops.opensmd: collectives as torch operators, which torch.compile takes into its graphs, and which cost less
// than torch.distributed's functions: no Python between the caller and the group.
//
// They write to their first argument and return nothing, as torch.compile requires of operators that write. The group
// is given by name, which a graph can hold.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/library.h>

#include <string>

#include "torch/direct.hpp"

namespace opensmd {
namespace {

BackendPtr backend_of(c10::string_view group, const at::Tensor& tensor) {
  return c10d::resolve_process_group(std::string(group))->getBackend(tensor.device().type());
}

bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

at::Tensor resolved(const at::Tensor& tensor) { return is_lazy(tensor) ? tensor.resolve_conj().resolve_neg() : tensor; }

// Calls `write` with `output`, or with a copy whose bytes are its values where it is lazily conjugated or negated.
template <typename Write>
void into(const at::Tensor& output, Write write) {
  const at::Tensor values = resolved(output);
  write(values);
  if (is_lazy(output)) output.copy_(values);
}

void all_reduce_(at::Tensor tensor, c10::string_view op, c10::string_view group) {
  into(tensor, [&](const at::Tensor& values) { direct_all_reduce(*backend_of(group, tensor), values, op); });
}

void broadcast_(at::Tensor tensor, int64_t root, c10::string_view group) {
  into(tensor, [&](const at::Tensor& values) { direct_broadcast(*backend_of(group, tensor), values, root); });
}

void all_gather_into_(at::Tensor output, at::Tensor input, c10::string_view group) {
  into(output, [&](const at::Tensor& all) { direct_all_gather(*backend_of(group, input), all, resolved(input)); });
}

void reduce_scatter_into_(at::Tensor output, at::Tensor input, c10::string_view op, c10::string_view group) {
  into(output, [&](const at::Tensor& own) { direct_reduce_scatter(*backend_of(group, input), own, resolved(input), op); });
}

void all_to_all_into_(at::Tensor output, at::Tensor input, c10::string_view group) {
  into(output, [&](const at::Tensor& all) { direct_all_to_all(*backend_of(group, input), all, resolved(input)); });
}

constexpr const char* kNames[] = {"all_reduce_", "broadcast_", "all_gather_into_", "reduce_scatter_into_",
                                  "all_to_all_into_"};

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

// torch's own fallback for lazy tensors cannot call operators that return nothing.
TORCH_LIBRARY_IMPL(opensmd, Conjugate, library) {
  for (const char* name : kNames) library.impl(name, torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(opensmd, Negative, library) {
  for (const char* name : kNames) library.impl(name, torch::CppFunction::makeFallthrough());
}

// While torch.compile traces, tensors have no data: nothing happens, since nothing is returned.
TORCH_LIBRARY_IMPL(opensmd, Meta, library) {
  library.impl("all_reduce_", [](at::Tensor, c10::string_view, c10::string_view) {});
  library.impl("broadcast_", [](at::Tensor, int64_t, c10::string_view) {});
  library.impl("all_gather_into_", [](at::Tensor, at::Tensor, c10::string_view) {});
  library.impl("reduce_scatter_into_", [](at::Tensor, at::Tensor, c10::string_view, c10::string_view) {});
  library.impl("all_to_all_into_", [](at::Tensor, at::Tensor, c10::string_view) {});
}

}  // namespace
}  // namespace opensmd
