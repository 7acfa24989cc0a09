#include "core/timeline/event_ring.hpp"

namespace opensmd {

EventRing::EventRing(size_t capacity) : capacity_(capacity), slots_(new Slot[capacity]) {
  for (size_t i = 0; i < capacity; ++i) slots_[i].turn.store(i, std::memory_order_relaxed);
}

bool EventRing::add(const Event& event) {
  uint64_t position = added_.load(std::memory_order_relaxed);
  for (;;) {
    Slot& slot = slots_[position & (capacity_ - 1)];
    const auto ahead = static_cast<int64_t>(slot.turn.load(std::memory_order_acquire) - position);
    if (ahead < 0) {
      lose(event);
      return false;
    }
    if (ahead > 0) {
      position = added_.load(std::memory_order_relaxed);  // another thread was faster
    } else if (added_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
      slot.event = event;
      slot.turn.store(position + 1, std::memory_order_release);
      __builtin_prefetch(&slots_[(position + 1) & (capacity_ - 1)], 1);  // other work will have cleared the caches
      return position - taken_.load(std::memory_order_relaxed) == capacity_ / 2;
    }
  }
}

std::vector<Event> EventRing::take() {
  std::vector<Event> events;
  uint64_t position = taken_.load(std::memory_order_relaxed);
  events.reserve(added_.load(std::memory_order_relaxed) - position);
  for (;; ++position) {
    Slot& slot = slots_[position & (capacity_ - 1)];
    if (slot.turn.load(std::memory_order_acquire) != position + 1) break;
    events.push_back(slot.event);
    slot.turn.store(position + capacity_, std::memory_order_release);
  }
  taken_.store(position, std::memory_order_relaxed);
  return events;
}

void EventRing::lose(const Event& event) {
  if (lost_.fetch_add(1, std::memory_order_relaxed) == 0) first_lost_ns_.store(event.start_ns, std::memory_order_relaxed);
}

EventRing::Lost EventRing::take_lost() {
  const uint64_t first_ns = first_lost_ns_.load(std::memory_order_relaxed);
  return {lost_.exchange(0, std::memory_order_relaxed), first_ns};
}

}  // namespace opensmd
