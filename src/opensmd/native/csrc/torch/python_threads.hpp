// What the core asks Python about its threads, from threads that do not hold the GIL.
#pragma once

#include <string>

namespace opensmd {

// Whether the calling thread is the only Python thread in this process.
bool only_python_thread();

// A RuntimeWarning, raised by the only Python thread.
void warn_in_python(const std::string& text);

}  // namespace opensmd
