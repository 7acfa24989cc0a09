#include "torch/hosts/late_waits.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/protocol/clock.hpp"

namespace opensmd {
namespace {

constexpr std::chrono::milliseconds kEvery{500};
constexpr uint64_t kLate = 1'000'000'000u;  // ns; then after twice as long, and so on
constexpr uint64_t kLongestPause = 60 * kLate;

}  // namespace

void LateWaits::begin() {
  state_->since_ns.store(now_ns(), std::memory_order_relaxed);
  if (watched_) return;
  watched_ = true;
  // Detached: a process that ends, or a forked one without this thread, has nothing to wait for.
  std::thread([state = state_, look = look_, compare = compare_] { watch(state, look, compare); }).detach();
}

void LateWaits::watch(const std::shared_ptr<State>& state, const Look& look, const Look& compare) {
  uint64_t seen = 0, pause = kLate, next = 0;
  while (true) {
    std::this_thread::sleep_for(kEvery);
    if (state->over) return;
    const uint64_t since = state->since_ns.load(std::memory_order_relaxed), now = now_ns();
    if (since != seen) {
      seen = since;
      pause = kLate;
      next = since + pause;
    }
    if (seen == 0 || now < seen + kLate) continue;
    look();
    if (now < next) continue;
    compare();
    pause = std::min(2 * pause, kLongestPause);
    next = now + pause;
  }
}

}  // namespace opensmd
