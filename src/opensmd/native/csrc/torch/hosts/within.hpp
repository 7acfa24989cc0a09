// Work that may never end, because the process that it asks is dead or stopped.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace opensmd {

// The process that serves the store may be the dead one, or stopped.
constexpr std::chrono::milliseconds kStoresTime{1000};

// What `work` returns, or nothing where it fails or takes too long; then its thread is left behind.
std::string within(std::chrono::milliseconds limit, std::function<std::string()> work);

}  // namespace opensmd
