// The flight record: each member's last operations, in the arena, so that a stall report can read its peers'. Error
// messages also quote it about other members' calls.
#pragma once

#include <vector>

#include "core/memory/arena.hpp"
#include "core/protocol/member_status.hpp"

namespace opensmd {

// Those aspects of a call on which all members must agree.
struct Signature {
  Operation operation = Operation::None;
  DType dtype = DType::Byte;
  Reduction reduction = Reduction::Sum;
  int root = -1;
  int64_t tag = 0;
  uint64_t count = 0;
  uint64_t shape_hash = 0;  // of per-member counts, where the operation has them

  uint32_t hash() const;
};

class Record {
 public:
  enum Kind { Collectives = 0, Messages = 1 };

  Record(const Arena& arena, int member, Kind kind) : lines_(arena.record(member, kind)) {}

  // Writing: the owner only, one thread at a time.
  uint64_t begin(uint64_t sequence, const Signature& signature, std::string_view text);  // returns the start in ns
  uint64_t end(uint64_t sequence);  // and the end

  // Any reader, at any time; lines overwritten meanwhile are left out.
  RecordEntry at(uint64_t sequence) const;
  std::vector<RecordEntry> latest(uint64_t last) const;

 private:
  RecordLine& line(uint64_t sequence) const { return lines_[sequence % kRecordLength]; }
  RecordLine* lines_;
};

}  // namespace opensmd
