#include "torch/timeline/call_log.hpp"

#include <utility>

#include "core/protocol/clock.hpp"

namespace opensmd {

CallLog& CallLog::of_process() {
  static auto* log = new CallLog;  // never destroyed: Gloo's threads may still end calls when the process does
  return *log;
}

LoggedCall CallLog::begin(const std::string& group, const char* operation, size_t bytes) {
  std::lock_guard lock(mutex_);
  return {group, operation, ++sequences_[group], now_ns(), 0, bytes};
}

void CallLog::end(LoggedCall call) {
  call.end_ns = now_ns();
  add(std::move(call));
}

void CallLog::add(LoggedCall call) {
  std::lock_guard lock(mutex_);
  ended_.push_back(std::move(call));
}

std::vector<LoggedCall> CallLog::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

}  // namespace opensmd
