// What this process has done, for the timeline (opensmd/timeline): a ring of events, and the names they go by. Nothing
// is recorded before a timeline is asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/kernels/types.hpp"
#include "core/timeline/event_ring.hpp"

namespace opensmd {

class EventLog {
 public:
  static EventLog& of_process();

  // From now on. Writes a byte to `alarm`, a descriptor that must not block, whenever half of the ring fills up.
  void start(int alarm);
  void stop();
  bool on() const { return on_.load(std::memory_order_acquire); }

  // Adds a newly made group; what is begun under its name belongs to it. Its number is not 0.
  uint32_t add_group(const std::string& name);
  // The id of calls with this name. For the core's calls it is their Operation's.
  uint32_t operation(std::string_view name);
  std::vector<std::string> operations() const;

  // An event that begins now: the next collective of the latest group of that name, or a message in it.
  Event begin(const std::string& group, uint32_t operation, size_t bytes);
  Event begin_message(const std::string& group, uint32_t operation, size_t bytes);
  void end(Event event);  // now
  void add(const Event& event);
  EventRing& ring() { return *ring_; }  // only after start()

 private:
  struct Group {
    uint32_t number = 0;
    uint64_t sequence = 0;
  };

  EventLog();
  Event begin(const std::string& group, uint32_t operation, size_t bytes, uint64_t calls);

  std::atomic<bool> on_{false};
  std::atomic<int> alarm_{-1};
  std::unique_ptr<EventRing> ring_;
  mutable std::mutex mutex_;  // guards the rest
  uint32_t groups_made_ = 0;
  std::map<std::string, Group, std::less<>> groups_;
  std::map<std::string, uint32_t, std::less<>> numbers_;
  std::vector<std::string> operations_;
};

}  // namespace opensmd
