#include <Python.h>

#include "torch/numbered_devices.hpp"

#include <torch/csrc/Device.h>

namespace opensmd {
namespace {

newfunc torchs_own = nullptr;  // while it is replaced

PyObject* new_device(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  const bool alone = keywords == nullptr && PyTuple_GET_SIZE(args) == 1;
  PyObject* number = alone ? PyTuple_GET_ITEM(args, 0) : nullptr;
  if (number == nullptr || !PyLong_CheckExact(number)) return torchs_own(type, args, keywords);
  PyObject* named = Py_BuildValue("(sO)", "cuda", number);
  if (named == nullptr) return nullptr;
  PyObject* device = torchs_own(type, named, nullptr);
  Py_DECREF(named);
  return device;
}

}  // namespace

// The type itself stays: torch and its compiler know it by its identity, and nothing can be put in its place.
void number_cuda_devices(bool on) {
  if (on == (torchs_own != nullptr)) return;
  if (on) torchs_own = THPDeviceType.tp_new;
  THPDeviceType.tp_new = on ? new_device : torchs_own;
  if (!on) torchs_own = nullptr;
}

}  // namespace opensmd
