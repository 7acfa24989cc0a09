// What Python sees of the compiled module: process groups and, for modelparallel, messages, graphs and memory.
#include <torch/csrc/utils/pybind.h>

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>

#include "pipeline/mailbox_bindings.hpp"
#include "torch/backend.hpp"
#include "torch/direct.hpp"
#include "torch/hosts/gloo_transport.hpp"
#include "torch/memory/tensor_memory.hpp"
#include "torch/numbered_devices.hpp"
#include "torch/python_object.hpp"
#include "torch/python_threads.hpp"
#include "torch/timeline/torch_calls.hpp"

namespace py = pybind11;

namespace opensmd {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

template <typename Function>
Function holding_gil(py::object callable) {
  using Result = typename Function::result_type;
  return [shared = kept(std::move(callable))](auto... arguments) -> Result {
    py::gil_scoped_acquire gil;
    return (*shared)(arguments...).template cast<Result>();
  };
}

Makers makers(py::object device_backend, py::object meet_on_device, py::object split) {
  return {holding_gil<decltype(Makers::device_backend)>(std::move(device_backend)),
          holding_gil<decltype(Makers::meet_on_device)>(std::move(meet_on_device)),
          holding_gil<decltype(Makers::split)>(std::move(split))};
}

// `fd`: the arena's, needed only during this call. `names`: the members'. `cores`: that they may use at once.
std::shared_ptr<Group> make_group(int fd, std::vector<std::string> names, int rank, std::chrono::milliseconds timeout,
                                  int cores) {
  GroupConfig config;
  config.rank = rank;
  config.size = static_cast<int>(names.size());
  config.fd = fd;
  config.names = std::move(names);
  config.timeout = timeout;
  config.cores = cores;
  config.alone = only_python_thread;
  config.warn = warn_in_python;
  std::shared_ptr<Group> group;
  with_torch_errors([&] { group = std::make_shared<Group>(std::move(config)); });
  return group;
}

c10::intrusive_ptr<SmddpBackend> make_shared_backend(std::shared_ptr<Group> group, std::vector<std::string> names,
                                                     int rank, int size, c10::intrusive_ptr<SmddpOptions> options,
                                                     py::object device_backend, py::object meet_on_device,
                                                     py::object split) {
  return c10::make_intrusive<SmddpBackend>(make_shared_transport(std::move(group)), names.at(static_cast<size_t>(rank)),
                                           rank, size, std::move(options),
                                           makers(std::move(device_backend), std::move(meet_on_device), std::move(split)));
}

// `local`: this host's members; null if they share no memory, and each counts as a host.
c10::intrusive_ptr<SmddpBackend> make_gloo_backend(BackendPtr gloo, int connections,
                                                   c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> local,
                                                   std::vector<std::vector<int>> hosts,
                                                   std::vector<std::string> names, int rank, int size,
                                                   c10::intrusive_ptr<SmddpOptions> options,
                                                   py::object device_backend, py::object meet_on_device,
                                                   py::object split, size_t carried, size_t ring_from,
                                                   size_t turns_from, size_t least_part, size_t piece, size_t tree_from) {
  auto transport =
      make_gloo_transport(std::move(gloo), connections, std::move(store), std::move(hosts), std::move(local), names,
                          {carried, ring_from, turns_from, least_part, piece, tree_from});
  return c10::make_intrusive<SmddpBackend>(std::move(transport), names.at(static_cast<size_t>(rank)), rank, size,
                                           std::move(options), makers(std::move(device_backend), std::move(meet_on_device), std::move(split)));
}

py::dict entry_dict(const RecordEntry& entry) {
  py::dict found;
  found["sequence"] = entry.sequence;
  found["operation"] = name_of(entry.operation);
  found["dtype"] = name_of(entry.dtype);
  found["reduction"] = name_of(entry.reduction);
  found["root"] = entry.root;
  found["tag"] = entry.tag;
  found["count"] = entry.count;
  found["bytes"] = entry.bytes;
  found["start_ns"] = entry.start_ns;
  found["end_ns"] = entry.end_ns;
  found["text"] = entry.text;
  found["description"] = entry.describe();
  return found;
}

std::shared_ptr<Group> shared_group(const SmddpBackend& backend) {
  auto group = backend.shared_group();
  TORCH_CHECK(group != nullptr,
              "smddp: this group spans hosts, so Gloo moves its data and there is no shared-memory group behind it");
  return group;
}

py::dict status(const Group& group, int member) {
  auto found = group.status(member);
  py::dict answer;
  answer["state"] = name_of(found.state);
  answer["entered"] = found.entered;
  answer["completed"] = found.completed;
  answer["last"] = entry_dict(found.last);
  return answer;
}

py::list records(const std::vector<RecordEntry>& entries) {
  py::list found;
  for (const auto& entry : entries) found.append(entry_dict(entry));
  return found;
}

void bind_arena(py::module_& module) {
  py::class_<ArenaShape>(module, "ArenaShape")
      .def(py::init<>())
      .def_readwrite("size", &ArenaShape::size)
      .def_readwrite("heap_bytes", &ArenaShape::heap_bytes);
  py::class_<ArenaFile>(module, "ArenaFile")
      .def_readonly("fd", &ArenaFile::fd)
      .def_readonly("path", &ArenaFile::path)
      .def_readonly("token", &ArenaFile::token);
  module.def("create_arena_file", [](const ArenaShape& shape, bool named) {
    return create_arena_file(shape, named ? ArenaPlace::DevShm : ArenaPlace::Memfd);
  });
  module.def("open_arena_file", &open_arena_file);
  module.def("unlink_arena_file", &unlink_arena_file);
  module.def("default_heap_bytes", &default_heap_bytes);
}

void bind_group(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "Group")
      .def(py::init(&make_group), py::kw_only(), py::arg("fd"), py::arg("names"), py::arg("rank"), py::arg("timeout"),
           py::arg("cores"))
      .def("size", &Group::size)
      .def("status", &status)
      .def("record", [](const Group& self, int member) { return records(self.record(member)); })
      .def("message_record", [](const Group& self, int member) { return records(self.message_record(member)); })
      .def("heap_contains", [](const Group& self, const at::Tensor& tensor) {
        return self.heap_contains(tensor.const_data_ptr());
      });
}

// A device without a number is this thread's current one.
bool supports_tensor_alloc(SmddpBackend& backend, at::Device device) {
  if (device.is_cpu()) return backend.supportsTensorAlloc(-1);
  if (!at::hasCUDA()) return false;
  if (!device.has_index()) device = c10::impl::VirtualGuardImpl(device.type()).getDevice();
  return backend.supportsTensorAlloc(device.index());
}

// A method that only the class of torch's NCCL has, and only in Python.
auto method_of_nccl(const char* name) {
  return [name](SmddpBackend& self, const py::args& given, const py::kwargs& named) {
    return py::object(py::cast(self.device_backend()).attr(name)(*given, **named));
  };
}

Compression compression_of(const std::string& name) {
  for (const auto known : {Compression::None, Compression::Bf16, Compression::Fp16, Compression::Int8}) {
    if (name == name_of(known)) return known;
  }
  throw py::value_error(c10::str("smddp: compression is '", name, "', but there are none, bf16, fp16 and int8"));
}

void bind_backend(py::module_& module) {
  auto base = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<SmddpOptions, c10::intrusive_ptr<SmddpOptions>>(module, "Options", base.attr("Options"))
      .def(py::init([](std::chrono::milliseconds timeout, const std::string& compression) {
             return c10::make_intrusive<SmddpOptions>(timeout, compression_of(compression));
           }),
           py::arg("timeout") = kBackendDefaultTimeout, py::arg("compression") = name_of(Compression::None))
      // split_group copies the options of the parent group.
      .def("__deepcopy__", [](const SmddpOptions& self, const py::dict&) {
        return c10::make_intrusive<SmddpOptions>(self);
      });
  py::class_<SmddpBackend, c10::intrusive_ptr<SmddpBackend>>(module, "SmddpBackend", base)
      .def_property_readonly("shared_group", &shared_group)
      .def_property_readonly("options", &SmddpBackend::getBackendOptions)
      .def("_set_default_timeout", &SmddpBackend::setTimeout, NoGil())
      .def(
          "allocate_tensor",
          [](SmddpBackend& self, long size, at::ScalarType dtype, const at::Device& device) {
            return self.allocate(size, at::TensorOptions(dtype).device(device));
          },
          py::arg("size"), py::kw_only(), py::arg("dtype"), py::arg("device"), NoGil())
      .def(
          "all_reduce_compressed",
          [](SmddpBackend& self, const at::Tensor& tensor, bool average, const std::string& compression,
             const std::optional<at::Tensor>& residual) {
            return self.all_reduce_compressed(tensor, average ? Reduction::Average : Reduction::Sum,
                                              compression_of(compression), residual);
          },
          py::arg("tensor"), py::kw_only(), py::arg("average"), py::arg("compression"), py::arg("residual"), NoGil())
      .def("supports_tensor_alloc", &supports_tensor_alloc, py::arg("device"), NoGil())
      .def("register_mem_pool", method_of_nccl("register_mem_pool"))
      .def("deregister_mem_pool", method_of_nccl("deregister_mem_pool"))
      .def("record_as", &SmddpBackend::record_as, py::arg("group"))
      .def("abort_with", py::overload_cast<const std::string&>(&SmddpBackend::abort), py::arg("reason"))
      .def(
          "lost_members",
          [](const SmddpBackend& self) {
            py::dict found;
            for (const auto& [member, state] : self.lost_members()) found[py::int_(member)] = name_of(state);
            return found;
          })
      .def("spans_hosts", [](const SmddpBackend& self) { return self.shared_group() == nullptr; })
      // torch calls this on ranks outside a new group when a device is bound; NCCL needs it, this backend does not.
      .def("perform_nocolor_split", [](SmddpBackend&, const py::object&) {});
  module.def("make_shared_backend", &make_shared_backend, py::kw_only(), py::arg("group"), py::arg("names"),
             py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("device_backend"),
             py::arg("meet_on_device"), py::arg("split"));
  module.def("make_gloo_backend", &make_gloo_backend, py::kw_only(), py::arg("gloo"), py::arg("connections"),
             py::arg("store"), py::arg("local"), py::arg("hosts"), py::arg("names"), py::arg("rank"), py::arg("size"),
             py::arg("options"), py::arg("device_backend"), py::arg("meet_on_device"), py::arg("split"), py::arg("carried"),
             py::arg("ring_from"), py::arg("turns_from"), py::arg("least_part"), py::arg("piece"),
             py::arg("tree_from"));
}

void bind_direct(py::module_& module) {
  py::class_<DirectGroup>(module, "DirectGroup")
      .def(py::init<GroupPtr>())
      .def("all_reduce_", &DirectGroup::all_reduce, py::arg("tensor"), py::arg("op") = "sum", NoGil())
      .def("broadcast_", &DirectGroup::broadcast, py::arg("tensor"), py::arg("root") = 0, NoGil())
      .def("all_gather_into_", &DirectGroup::all_gather, py::arg("output"), py::arg("input"), NoGil())
      .def("reduce_scatter_into_", &DirectGroup::reduce_scatter, py::arg("output"), py::arg("input"),
           py::arg("op") = "sum", NoGil())
      .def("all_to_all_into_", &DirectGroup::all_to_all, py::arg("output"), py::arg("input"), NoGil());
}

py::tuple take_events() {
  auto& ring = EventLog::of_process().ring();
  std::vector<Event> events;
  EventRing::Lost lost;
  {
    py::gil_scoped_release unlocked;
    events = ring.take();
    lost = ring.take_lost();
  }
  py::bytes raw(reinterpret_cast<const char*>(events.data()), events.size() * sizeof(Event));
  return py::make_tuple(raw, lost.count, lost.first_ns);
}

void bind_events(py::module_& module) {
  module.def("record_events", [](int alarm) { EventLog::of_process().start(alarm); });
  module.def("stop_events", [] { EventLog::of_process().stop(); });
  module.def("add_event_group", [](const std::string& name) { return EventLog::of_process().add_group(name); });
  module.def("event_operations", [] { return EventLog::of_process().operations(); });
  module.def("take_events", &take_events);
  module.def("record_calls_of_torch", &record_calls_of_torch);
  module.def("leave_calls_of_torch", &leave_calls_of_torch);
  module.def("record_device_calls", [](const BackendPtr& backend, uint32_t group) {
    record_device_calls(*backend, group);
  });
}

void bind_memory(py::module_& module) {
  module.def("keep_tensor_memory", &keep_tensor_memory);
  module.def("end_step_of_tensor_memory", [] { tensor_blocks().end_step(); }, NoGil());
  py::class_<KeptBlocks::Bytes>(module, "TensorMemory")
      .def_readonly("in_use", &KeptBlocks::Bytes::in_use)
      .def_readonly("kept", &KeptBlocks::Bytes::kept)
      .def_readonly("most", &KeptBlocks::Bytes::most);
  module.def("tensor_memory", [] { return tensor_blocks().bytes(); });
}

void bind_devices(py::module_& module) { module.def("number_cuda_devices", &number_cuda_devices); }

}  // namespace
}  // namespace opensmd

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  opensmd::bind_arena(module);
  opensmd::bind_group(module);
  opensmd::bind_backend(module);
  opensmd::bind_direct(module);
  opensmd::bind_mailbox(module);
  opensmd::bind_events(module);
  opensmd::bind_memory(module);
  opensmd::bind_devices(module);
}
