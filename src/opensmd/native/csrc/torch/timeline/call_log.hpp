// The collectives of this process that no record in shared memory holds, for the timeline (opensmd/timeline): those of
// smddp between hosts, and those that torch's own backends serve. Nothing is noted before a timeline is asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace opensmd {

// `sequence` counts the calls of the groups of one name, alike on all their ranks.
struct LoggedCall {
  std::string group;
  std::string operation;
  uint64_t sequence;
  uint64_t start_ns;
  uint64_t end_ns;
  size_t bytes;
};

class CallLog {
 public:
  static CallLog& of_process();

  void start() { on_ = true; }
  bool on() const { return on_; }

  // A call that begins now.
  LoggedCall begin(const std::string& group, const char* operation, size_t bytes);
  void end(LoggedCall call);  // now
  void add(LoggedCall call);
  std::vector<LoggedCall> take();  // and forget

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::unordered_map<std::string, uint64_t> sequences_;
  std::vector<LoggedCall> ended_;
};

}  // namespace opensmd
