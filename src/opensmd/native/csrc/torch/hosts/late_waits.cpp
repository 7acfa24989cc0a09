#include "torch/hosts/late_waits.hpp"

#include <chrono>
#include <thread>

#include "core/protocol/clock.hpp"
#include "torch/hosts/pauses.hpp"

namespace opensmd {
namespace {

constexpr std::chrono::milliseconds kEvery{500};

uint64_t ns(std::chrono::nanoseconds time) { return static_cast<uint64_t>(time.count()); }

}  // namespace

void LateWaits::begin() {
  state_->since_ns.store(now_ns(), std::memory_order_relaxed);
  if (watched_) return;
  watched_ = true;
  // Detached: neither a process that ends nor a forked one without this thread has anything to wait for.
  std::thread([state = state_, look = look_, compare = compare_] { watch(state, look, compare); }).detach();
}

void LateWaits::watch(const std::shared_ptr<State>& state, const Look& look, const Look& compare) {
  uint64_t seen = 0, next = 0;
  Pauses pauses;
  while (true) {
    std::this_thread::sleep_for(kEvery);
    if (state->over) return;
    const uint64_t since = state->since_ns.load(std::memory_order_relaxed), now = now_ns();
    if (since != seen) {
      seen = since;
      pauses = {};
      next = since + ns(pauses.next());
    }
    if (seen == 0 || now < seen + ns(Pauses::kFirst)) continue;
    look();
    if (now < next) continue;
    compare();
    next = now + ns(pauses.next());
  }
}

}  // namespace opensmd
