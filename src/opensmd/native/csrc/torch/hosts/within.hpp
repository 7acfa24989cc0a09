// Work that may never end because the process it asks is dead or stopped.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace opensmd {

// The process that serves the store may itself be dead or stopped.
constexpr std::chrono::milliseconds kStoresTime{1000};

// The result of `work`, or nothing if it fails or takes too long; its thread is then left behind.
std::string within(std::chrono::milliseconds limit, std::function<std::string()> work);

}  // namespace opensmd
