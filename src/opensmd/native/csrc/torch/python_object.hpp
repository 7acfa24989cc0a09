// Python objects held by threads without Python's lock.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace opensmd {

// Copied and dropped without Python's lock, which a user of the object must take.
inline std::shared_ptr<pybind11::object> kept(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* last) {
            if (!Py_IsInitialized()) return;  // it may outlive Python; then there is no memory to give back
            pybind11::gil_scoped_acquire gil;
            delete last;
          }};
}

}  // namespace opensmd
