// Parts in flight: they begin and end in order.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>

namespace opensmd::levels {

template <typename Travelling>
class InFlight {
 public:
  Travelling& begin(Travelling part = {}) {
    parts_.push_back(std::move(part));
    return parts_.back();
  }
  Travelling& at(size_t index) { return parts_[index - ended_]; }
  void end_first() {
    parts_.pop_front();
    ++ended_;
  }

 private:
  std::deque<Travelling> parts_;
  size_t ended_ = 0;
};

}  // namespace opensmd::levels
