#include <Python.h>

#include "torch/python_threads.hpp"

#include <pybind11/pybind11.h>

namespace opensmd {

// Needs no GIL: follows only what belongs to the calling thread. A new thread becomes the head of the list.
bool only_python_thread() {
  if (!Py_IsInitialized()) return false;
  PyThreadState* own = PyGILState_GetThisThreadState();
  if (own == nullptr) return false;
  PyInterpreterState* interpreter = PyThreadState_GetInterpreter(own);
  return PyInterpreterState_Head() == interpreter && PyInterpreterState_Next(interpreter) == nullptr &&
         PyInterpreterState_ThreadHead(interpreter) == own && PyThreadState_Next(own) == nullptr;
}

void warn_in_python(const std::string& text) {
  pybind11::gil_scoped_acquire gil;
  // Even if warnings are errors the call goes on: it must not stop half way.
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) PyErr_WriteUnraisable(nullptr);
}

}  // namespace opensmd
