// A member's last collectives, as told to the others when calls differ. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/protocol/record.hpp"

namespace opensmd {

class CallHistory {
 public:
  void add(uint64_t sequence, const Signature& signature, std::string_view text);

  // For first_difference().
  std::string text() const;

 private:
  struct Entry {
    uint64_t sequence = 0;  // 0: none
    Signature signature;
    std::string text;
  };

  std::array<Entry, 16> entries_;
};

// "rank 0 called a; rank 1 and rank 2 called b", for the first collective in which members differ; nothing if none do.
// `texts`: the members' histories, empty for a member that has not reported.
std::optional<std::string> first_difference(const std::vector<std::string>& names,
                                            const std::vector<std::string>& texts);

}  // namespace opensmd
