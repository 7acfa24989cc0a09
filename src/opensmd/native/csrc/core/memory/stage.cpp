#include "core/memory/stage.hpp"

#include <algorithm>

namespace opensmd {

namespace {
constexpr size_t kReserveStep = size_t{256} << 10;
}

uint64_t Stage::place(uint64_t sequence, size_t bytes) {
  const size_t limit = arena_.streams_offset();
  if (bytes <= kNotesBytes / 2) {
    reserve(0, kNotesBytes, limit, reserved_for_places_);
    return (sequence & 1) * (kNotesBytes / 2);
  }
  if (place_cursor_ + bytes > arena_.places_bytes()) place_cursor_ = 0;
  const size_t offset = kNotesBytes + place_cursor_;
  place_cursor_ = round_up(place_cursor_ + bytes, kLine);
  reserve(0, offset + bytes, limit, reserved_for_places_);
  return offset;
}

uint32_t Stage::first_slot(size_t slot_bytes, uint32_t slots) const {
  const size_t next = (stream_cursor_ + slot_bytes - 1) / slot_bytes;
  return static_cast<uint32_t>(next % slots);
}

void Stage::begin_stream(uint32_t first_slot, size_t slot_bytes, uint32_t slots, uint32_t steps) {
  const uint32_t end = first_slot + steps;
  stream_cursor_ = end % slots * slot_bytes;
  slot_bytes_ = slot_bytes;
  slots_ = slots;
  reserve(arena_.streams_offset(), std::min(end, slots) * slot_bytes, arena_.streams_bytes(), reserved_for_streams_);
}

void Stage::reserve(size_t begin, size_t end, size_t limit, size_t& reserved) {
  if (end <= reserved) return;
  const size_t wanted = std::min(round_up(end, kReserveStep), limit);
  arena_.reserve(at(begin + reserved), wanted - reserved);
  reserved = wanted;
}

}  // namespace opensmd
