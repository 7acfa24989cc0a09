// What one member can say of another: whether it is alive, and which calls it entered last.
#pragma once

#include <cstdint>
#include <string>

#include "core/kernels/types.hpp"

namespace opensmd {

enum class MemberState : uint8_t { NotJoined, Running, Stopped, Dead, Replaced, Left, Unknown };
const char* name_of(MemberState state);

// One line of the flight record. Times are CLOCK_MONOTONIC nanoseconds; end 0: still inside.
struct RecordEntry {
  uint64_t sequence = 0;
  Operation operation = Operation::None;
  DType dtype = DType::Byte;
  Reduction reduction = Reduction::Sum;
  int root = -1;  // the root, or the other member of a Send/Receive (-1: any)
  int64_t tag = 0;
  uint64_t count = 0;
  uint64_t bytes = 0;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  std::string text;
  // "broadcast(float32, count=4096, root=1) shape [64, 64]"; given the members' names, with the root's instead of its
  // number.
  std::string describe(const std::vector<std::string>* names = nullptr) const;
};

struct MemberStatus {
  MemberState state = MemberState::NotJoined;
  uint64_t entered = 0;    // sequence number of the last collective it entered; 0: none
  uint64_t completed = 0;  // and of the last it completed
  RecordEntry last;        // the last it entered
};

}  // namespace opensmd
