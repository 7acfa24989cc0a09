// What the core asks Python about its threads, from threads that do not hold the GIL.
#pragma once

#include <string>

namespace opensmd {

// Whether the calling thread is a thread of Python, and the only one in this process.
bool only_python_thread();

// A RuntimeWarning, from the only thread of Python.
void warn_in_python(const std::string& text);

}  // namespace opensmd
