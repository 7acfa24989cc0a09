// How long a wait goes on between checks that it is not in vain: longer and longer.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

namespace opensmd {

class Pauses {
 public:
  static constexpr std::chrono::seconds kFirst{1}, kLongest{60};

  std::chrono::seconds next() { return std::exchange(next_, std::min(2 * next_, kLongest)); }

 private:
  std::chrono::seconds next_ = kFirst;
};

}  // namespace opensmd
