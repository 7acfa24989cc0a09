#include "core/timeline/event_log.hpp"

#include <unistd.h>

#include "core/protocol/clock.hpp"

namespace opensmd {

namespace {

// 4 MiB: half of it holds what the fastest collectives produce between two looks, a quarter of a second apart.
constexpr size_t kRingLength = size_t{1} << 16;

}  // namespace

EventLog& EventLog::of_process() {
  static auto* log = new EventLog;  // never destroyed: Gloo's threads may still end calls at process exit
  return *log;
}

EventLog::EventLog() {
  for (auto known = Operation::None; known <= Operation::Receive;
       known = static_cast<Operation>(static_cast<int>(known) + 1)) {
    numbers_.emplace(name_of(known), static_cast<uint32_t>(operations_.size()));
    operations_.emplace_back(name_of(known));
  }
}

void EventLog::start(int alarm) {
  std::lock_guard lock(mutex_);
  if (!ring_) ring_ = std::make_unique<EventRing>(kRingLength);
  alarm_.store(alarm);
  on_.store(true, std::memory_order_release);
}

void EventLog::stop() { on_.store(false, std::memory_order_release); }

uint32_t EventLog::add_group(const std::string& name) {
  std::lock_guard lock(mutex_);
  groups_[name] = {++groups_made_, 0};
  return groups_made_;
}

uint32_t EventLog::operation(std::string_view name) {
  std::lock_guard lock(mutex_);
  const auto known = numbers_.find(name);
  if (known != numbers_.end()) return known->second;
  numbers_.emplace(name, static_cast<uint32_t>(operations_.size()));
  operations_.emplace_back(name);
  return static_cast<uint32_t>(operations_.size() - 1);
}

std::vector<std::string> EventLog::operations() const {
  std::lock_guard lock(mutex_);
  return operations_;
}

Event EventLog::begin(const std::string& group, uint32_t operation, size_t bytes) {
  return begin(group, operation, bytes, 1);
}

Event EventLog::begin_message(const std::string& group, uint32_t operation, size_t bytes) {
  return begin(group, operation, bytes, 0);
}

Event EventLog::begin(const std::string& group, uint32_t operation, size_t bytes, uint64_t calls) {
  Event event;
  event.operation = operation;
  event.bytes = bytes;
  {
    std::lock_guard lock(mutex_);
    const auto known = groups_.find(group);
    if (known != groups_.end()) {
      event.group = known->second.number;
      event.sequence = known->second.sequence += calls;
    }
  }
  event.start_ns = now_ns();
  return event;
}

void EventLog::end(Event event) {
  event.end_ns = now_ns();
  add(event);
}

void EventLog::add(const Event& event) {
  if (!on() || !ring_->add(event)) return;
  static_cast<void>(!write(alarm_.load(), "", 1));  // if it is full, it has been raised already
}

}  // namespace opensmd
