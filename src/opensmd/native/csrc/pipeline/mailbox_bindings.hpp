#pragma once

#include <pybind11/pybind11.h>

namespace opensmd {

void bind_mailbox(pybind11::module_& module);  // after the backend's class

}  // namespace opensmd
