// Notices collectives that take long and has the cause looked for: two hosts may wait for each other after calling
// different collectives, or the group may have failed elsewhere, unnoticed by members that wait in shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace opensmd {

class LateWaits {
 public:
  using Look = std::function<void()>;

  // `look` is called repeatedly, `compare` less and less often, from a separate thread; either may be running when this
  // object ends.
  LateWaits(Look look, Look compare) : look_(std::move(look)), compare_(std::move(compare)) {}
  ~LateWaits() { state_->over = true; }
  LateWaits(const LateWaits&) = delete;
  LateWaits& operator=(const LateWaits&) = delete;

  void begin();  // a collective; the first call starts the thread
  void end() { state_->since_ns.store(0, std::memory_order_relaxed); }

 private:
  struct State {
    std::atomic<uint64_t> since_ns{0};  // 0: there is none
    std::atomic<bool> over{false};
  };

  static void watch(const std::shared_ptr<State>& state, const Look& look, const Look& compare);

  const Look look_;
  const Look compare_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  bool watched_ = false;
};

}  // namespace opensmd
