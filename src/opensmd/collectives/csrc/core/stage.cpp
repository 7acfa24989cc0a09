#include "stage.hpp"

#include <algorithm>

namespace opensmd {

namespace {
constexpr size_t kReserveStep = size_t{256} << 10;
}

uint64_t Stage::place(uint64_t sequence, size_t bytes) {
  if (bytes <= kNotesBytes / 2) {
    reserve(kNotesBytes);
    return (sequence & 1) * (kNotesBytes / 2);
  }
  if (cursor_ + bytes > arena_.stage_ring_bytes()) cursor_ = 0;
  const size_t offset = kNotesBytes + cursor_;
  cursor_ = round_up(cursor_ + bytes, kLine);
  reserve(offset + bytes);
  return offset;
}

uint64_t Stage::first_slot(size_t slot_bytes) const {
  const size_t slots = arena_.stage_ring_bytes() / slot_bytes;
  return round_up(cursor_, slot_bytes) / slot_bytes % slots * slot_bytes;
}

void Stage::begin_steps(uint64_t first, size_t slot_bytes, uint32_t steps) {
  const size_t slots = arena_.stage_ring_bytes() / slot_bytes;
  const size_t end = first / slot_bytes + steps;
  cursor_ = (end % slots) * slot_bytes;
  reserve(kNotesBytes + std::min(end, slots) * slot_bytes);
}

void Stage::reserve(size_t end) {
  if (end <= reserved_) return;
  const size_t wanted = std::min(round_up(end, kReserveStep), kNotesBytes + arena_.stage_ring_bytes());
  arena_.reserve(at(reserved_), wanted - reserved_);
  reserved_ = wanted;
}

}  // namespace opensmd
