// What Python sees of messages and of the edges of autograd; opensmd.collectives.mailbox is the only direct user.
#include "pipeline/mailbox_bindings.hpp"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "pipeline/edges.hpp"
#include "pipeline/split_backward.hpp"
#include "torch/python_object.hpp"

namespace py = pybind11;

namespace opensmd {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
constexpr milliseconds kGroupsTimeout{0};

// Called, copied and dropped without Python's lock. What it raises passes through autograd as torch's own errors do.
std::function<void()> callback(py::object callable) {
  return [shared = kept(std::move(callable))] {
    py::gil_scoped_acquire gil;
    auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(shared->ptr()));
    if (!result) {
      python_error error;
      error.persist();
      throw error;
    }
  };
}

// Called without Python's lock, while the caller that gave `callable` waits.
BeginsBackward asking(py::handle callable) {
  return [callable](PyObject* function) {
    py::gil_scoped_acquire gil;
    return py::cast<bool>(callable(py::handle(function)));
  };
}

}  // namespace

void bind_mailbox(py::module_& module) {
  py::class_<TensorMailbox, std::shared_ptr<TensorMailbox>>(module, "Mailbox")
      .def(py::init<const c10::intrusive_ptr<SmddpBackend>&>())
      .def("send", &TensorMailbox::send, NoGil())
      .def("ready", &TensorMailbox::ready, NoGil())
      .def("receive", &TensorMailbox::receive, py::arg("source"), py::arg("tag"), py::arg("count"), py::arg("dtype"),
           py::arg("timeout") = kGroupsTimeout, NoGil())
      .def("take", &TensorMailbox::take, NoGil())
      .def("wait_any", &TensorMailbox::wait_any, py::arg("wanted"), py::arg("timeout") = kGroupsTimeout, NoGil())
      .def("sent", &TensorMailbox::sent, NoGil())
      .def("flush", &TensorMailbox::flush, py::arg("timeout") = kGroupsTimeout, NoGil());
  module.def("send_edge", [](const at::Tensor& sent, std::shared_ptr<TensorMailbox> mailbox, int member, int64_t tag,
                             int64_t missing, py::object expect) {
    return send_edge(sent, {std::move(mailbox), member, tag, missing}, callback(std::move(expect)));
  });
  module.def("receive_edge", [](const at::Tensor& received, std::shared_ptr<TensorMailbox> mailbox, int member,
                                int64_t tag, int64_t missing) {
    return receive_edge(received, {std::move(mailbox), member, tag, missing});
  });
  module.def("keeps_gradient", &keeps_gradient);
  py::class_<SplitBackward, std::shared_ptr<SplitBackward>>(module, "SplitBackward")
      .def_property_readonly("leaves_everything", &SplitBackward::leaves_everything)
      .def("run_first", torch::wrap_pybind_function_no_gil([](SplitBackward& self) { self.run_first(); }))
      .def("run_weights", torch::wrap_pybind_function_no_gil([](SplitBackward& self) { self.run_weights(); }));
  module.def("split_backward", [](const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                                  bool everything, py::handle begins_backward) {
    const BeginsBackward asked = asking(begins_backward);
    py::gil_scoped_release no_gil;
    return split_backward(roots, gradients, everything, asked);
  });
  module.def("are_apart", torch::wrap_pybind_function_no_gil(&are_apart));
}

}  // namespace opensmd
