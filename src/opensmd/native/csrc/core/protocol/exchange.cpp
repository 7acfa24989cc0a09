#include "core/protocol/exchange.hpp"

#include <algorithm>

namespace opensmd {

namespace {

constexpr size_t kSmallestStep = size_t{32} << 10;
constexpr size_t kLargestStep = size_t{128} << 10;
// A member that both gives and takes publishes at most this many steps ahead, even if there is room: what it has just
// published is then still in the caches when it is taken.
constexpr uint32_t kLead = 8;

}  // namespace

Exchange::Exchange(Context& context, Round& round, const Traffic& traffic, const void* const* inputs)
    : context_(context), round_(round), traffic_(traffic), inputs_(inputs), shared_(traffic.shared()),
      base_(context.steps) {}

void Exchange::run() {
  offer();
  round_.post();
  if (streams_own_ && traffic_.one_way()) stream_ahead();
  round_.meet();
  check_agreement();
  find_sources();
  take_direct();
  if (steps_ > 0) stream();
  bool direct_reads = false;
  for (int i = 0; i < context_.size; ++i) direct_reads |= sources_[i].way == Way::Heap;
  if (direct_reads) finish_together(context_, round_);
}

void Exchange::check_agreement() {}

void Exchange::published_step(size_t, size_t) {}

// ---------------------------------------------------------------- where pieces lie

size_t Exchange::total(int source, size_t padding) const {
  size_t sum = 0;
  for (int d = 0; d < context_.size; ++d) {
    if (d == source) continue;
    const size_t bytes = round_up(traffic_.bytes(source, d), padding);
    sum = shared_ ? std::max(sum, bytes) : sum + bytes;
  }
  return sum;
}

size_t Exchange::packed_offset(int source, int destination, size_t padding) const {
  if (shared_) return 0;
  size_t offset = 0;
  for (int d = 0; d < destination; ++d) {
    if (d != source) offset += round_up(traffic_.bytes(source, d), padding);
  }
  return offset;
}

size_t Exchange::lane(int source, int destination) const {
  if (traffic_.lanes(context_.size) == 1) return 0;
  return static_cast<size_t>((destination - source - 1 + context_.size) % context_.size);
}

size_t Exchange::lane_count() const { return static_cast<size_t>(std::max(traffic_.lanes(context_.size), 1)); }

// At least eight steps for arrays of middling size, so that writing and reading overlap, and more where readers only
// follow; at most what a lane holds.
size_t Exchange::step_bytes(int source) const {
  const size_t lane_bytes = context_.arena.shape().chunk_bytes / lane_count() / kLine * kLine;
  const size_t steps = traffic_.one_way() ? 32 : 8;
  const size_t wanted = std::clamp(traffic_.largest(source) / steps, kSmallestStep, kLargestStep);
  return std::min(lane_bytes, round_up(wanted, kLine));
}

uint32_t Exchange::steps(int source) const {
  size_t most = 0;
  for (int d = 0; d < context_.size; ++d) most = std::max(most, d == source ? 0 : traffic_.bytes(source, d));
  const size_t each = step_bytes(source);
  return static_cast<uint32_t>((most + each - 1) / each);
}

// Peers can read this member's tensor in place if all its pieces are contiguous in its heap.
bool Exchange::place_own_in_heap(Placement& placement) const {
  const int self = context_.rank;
  const std::byte* first = nullptr;
  const std::byte* next = nullptr;
  size_t sum = 0;
  for (int d = 0; d < context_.size; ++d) {
    const size_t bytes = traffic_.bytes(self, d);
    if (bytes == 0 || (shared_ && first != nullptr)) continue;
    const std::byte* piece = static_cast<const std::byte*>(inputs_[d]);
    if (next != nullptr && piece != next) return false;
    if (first == nullptr) first = piece;
    next = piece + bytes;
    sum += bytes;
  }
  return first != nullptr && place_in_heap(context_, first, sum, placement);
}

void Exchange::pack(std::byte* to, size_t padding) const {
  for (int d = 0; d < context_.size; ++d) {
    const size_t bytes = d == context_.rank ? 0 : traffic_.bytes(context_.rank, d);
    if (bytes == 0) continue;
    copy_bytes(to + packed_offset(context_.rank, d, padding), inputs_[d], bytes);
    if (shared_) return;
  }
}

// Before the round: writes the payload, and the stage if everything fits at once.
void Exchange::offer() {
  const int self = context_.rank;
  if (total(self, 1) <= kInlineBytes) return pack(round_.payload(), 1);
  Placement placement;
  const size_t padded = total(self, kLine);
  if (!place_own_in_heap(placement)) {
    if (padded <= context_.arena.shape().staging_bytes) {
      placement.offset = context_.stage.place(round_.sequence(), padded);
      pack(context_.stage.at(placement.offset), kLine);
    } else {
      placement.first_slot = context_.stage.first_slot(slot_bytes(self), slots(self));
      streams_own_ = true;
    }
  }
  announce(round_, placement);
}

void Exchange::find_sources() {
  for (int s = 0; s < context_.size; ++s) {
    sources_[s] = find_source(s);
    if (streams(s)) steps_ = std::max(steps_, sources_[s].steps);
  }
}

Exchange::Source Exchange::find_source(int s) const {
  const int self = context_.rank;
  Source source;
  source.bytes = traffic_.bytes(s, self);
  const size_t all = total(s, 1);
  if (all == 0) return source;
  if (all <= kInlineBytes) {
    source.way = Way::Inline;
    source.piece = round_.payload_of(s) + packed_offset(s, self, 1);
    return source;
  }
  source.placement = announced(round_, s);
  if (source.placement.in_heap != 0) {
    source.way = Way::Heap;
    source.piece = context_.arena.heap(s) + source.placement.offset;
    for (int d = 0; d < self && !shared_; ++d) source.piece += traffic_.bytes(s, d);
  } else if (total(s, kLine) <= context_.arena.shape().staging_bytes) {
    source.way = Way::Staged;
    source.piece = context_.arena.stage(s) + source.placement.offset + packed_offset(s, self, kLine);
  } else {
    source.way = Way::Streamed;
    source.step_bytes = step_bytes(s);
    source.steps = steps(s);
    source.slots = slots(s);
  }
  return source;
}

// ---------------------------------------------------------------- streaming

std::byte* Exchange::slot(int source, uint32_t step) const {
  const Source& from = sources_[source];
  return stream_slot(context_.arena, source, from.step_bytes * lane_count(),
                     (from.placement.first_slot + step) % from.slots);
}

const std::byte* Exchange::streamed(int source, uint32_t step) const {
  return slot(source, step) + lane(source, context_.rank) * sources_[source].step_bytes;
}

void Exchange::publish(uint32_t step) {
  const int self = context_.rank;
  const Source& own = sources_[self];
  const size_t offset = step * own.step_bytes;
  std::byte* const to = slot(self, step);
  const auto copy = !from_memory_ ? copy_bytes : traffic_.one_way() ? copy_from_memory : copy_from_afar;
  for (int distance = 1; distance < context_.size; ++distance) {
    const int d = (self + distance) % context_.size;
    const size_t bytes = traffic_.bytes(self, d);
    if (offset >= bytes) continue;
    copy(to + lane(self, d) * own.step_bytes, static_cast<const std::byte*>(inputs_[d]) + offset,
         std::min(own.step_bytes, bytes - offset));
    if (shared_) break;
  }
  round_.set(context_.arena.member(self).published, base_ + step + 1);
  if (offset < own.bytes) published_step(offset, std::min(own.step_bytes, own.bytes - offset));
}

bool Exchange::step_available(uint32_t step) const {
  for (int s = 0; s < context_.size; ++s) {
    if (s == context_.rank || !streams(s) || step * sources_[s].step_bytes >= sources_[s].bytes) continue;
    const Flag& published = context_.arena.member(s).published;
    if (!reached(published.value.load(std::memory_order_acquire), base_ + step + 1)) return false;
  }
  return true;
}

void Exchange::wait_for_sources(uint32_t step) {
  for (int distance = 1; distance < context_.size; ++distance) {
    const int s = (context_.rank + distance) % context_.size;
    if (!streams(s) || step * sources_[s].step_bytes >= sources_[s].bytes) continue;
    round_.wait(context_.arena.member(s).published, base_ + step + 1, s);
  }
}

bool Exchange::all_consumed(uint32_t steps) const {
  for (int i = 0; i < context_.size; ++i) {
    const Flag& consumed = context_.arena.member(i).consumed;
    if (i != context_.rank && !reached(consumed.value.load(std::memory_order_acquire), steps)) return false;
  }
  return true;
}

bool Exchange::room_for(uint32_t step) const { return all_consumed(base_ + step + 1 - sources_[context_.rank].slots); }

void Exchange::wait_for_room(uint32_t step) {
  for (int distance = 1; distance < context_.size; ++distance) {
    const int peer = (context_.rank + distance) % context_.size;
    round_.wait(context_.arena.member(peer).consumed, base_ + step + 1 - sources_[context_.rank].slots, peer);
  }
}

// Before all have met, a peer may still be reading this member's slots of the last call, but of none earlier.
void Exchange::stream_ahead() {
  const int self = context_.rank;
  const Source& own = sources_[self] = find_source(self);
  if (!all_consumed(base_) && !context_.stage.continues(slot_bytes(self), own.slots)) return;
  begin_own_stream();
  while (published_ < own.steps && !round_.all_posted() && room_for(published_)) publish(published_++);
}

void Exchange::begin_own_stream() {
  if (begun_) return;
  begun_ = true;
  const int self = context_.rank;
  const Source& own = sources_[self];
  from_memory_ = total(self, 1) >= kPastCacheBytes;
  context_.stage.begin_stream(own.placement.first_slot, slot_bytes(self), own.slots, own.steps);
}

void Exchange::stream() {
  Member& mine = context_.arena.member(context_.rank);
  const uint32_t to_publish = streams(context_.rank) ? sources_[context_.rank].steps : 0;
  uint32_t to_consume = 0;
  for (int s = 0; s < context_.size; ++s) {
    if (s == context_.rank || !streams(s)) continue;
    const Source& source = sources_[s];
    to_consume = std::max(to_consume, static_cast<uint32_t>((source.bytes + source.step_bytes - 1) / source.step_bytes));
  }
  if (to_publish > 0) begin_own_stream();
  uint32_t consumed = 0;
  if (to_consume == 0) round_.set(mine.consumed, base_ + steps_);
  const auto consume = [&] {
    take_step(consumed++);
    round_.set(mine.consumed, base_ + (consumed == to_consume ? steps_ : consumed));
  };
  while (published_ < to_publish || consumed < to_consume) {
    const bool far_ahead = published_ == to_publish || published_ >= consumed + kLead;
    if (consumed < to_consume && far_ahead && step_available(consumed)) {
      consume();
    } else if (published_ < to_publish && room_for(published_)) {
      publish(published_++);
    } else if (consumed < to_consume && step_available(consumed)) {
      consume();
    } else if (consumed < to_consume && (published_ == to_publish || consumed < published_)) {
      // Only for a step that this member has published itself: members that wait for each other's next step would wait
      // in a circle.
      wait_for_sources(consumed);
    } else {
      wait_for_room(published_);
    }
  }
  // Others rely on all counters being current, even after calls in which this member had nothing to say.
  mine.published.value.store(base_ + steps_, std::memory_order_release);
  mine.reduced.value.store(base_ + steps_, std::memory_order_release);
  context_.steps += steps_;
}

// ---------------------------------------------------------------- copying

CopyingExchange::CopyingExchange(Context& context, Round& round, const Traffic& traffic, const void* const* inputs,
                                 void* const* outputs)
    : Exchange(context, round, traffic, inputs), outputs_(outputs), past_cache_(false) {}

void CopyingExchange::put(int source, size_t offset, const std::byte* from, size_t bytes) {
  std::byte* to = static_cast<std::byte*>(outputs_[source]) + offset;
  // This member's piece of a shared source was just read to be published.
  const bool warm = source == context_.rank && traffic_.shared();
  (!past_cache_ ? through_cache_ : warm ? copy_past_cache : copy_from_afar_past_cache)(to, from, bytes);
}

void CopyingExchange::take_direct() {
  size_t results = 0;
  for (int s = 0; s < context_.size; ++s) results += sources_[s].bytes;
  past_cache_ = results >= kPastCacheBytes;
  for (int distance = 1; distance < context_.size; ++distance) {
    const int s = (context_.rank + distance) % context_.size;
    const Source& source = sources_[s];
    if (source.bytes > 0 && source.way != Way::Nothing && source.way != Way::Streamed) {
      put(s, 0, source.piece, source.bytes);
    }
  }
  // This member's own streamed piece is copied step by step, while it is in the cache.
  const Source& own = sources_[context_.rank];
  const bool streamed_whole = own.way == Way::Streamed && own.steps * own.step_bytes >= own.bytes;
  if (!streamed_whole && own.bytes > 0 && outputs_[context_.rank] != own_piece()) {
    put(context_.rank, 0, own_piece(), own.bytes);
  }
  // Members that also give are not close behind another's writing.
  if (traffic_.one_way() && results <= kInCacheBytes) through_cache_ = copy_behind_writer;
}

void CopyingExchange::take_step(uint32_t step) {
  for (int distance = 1; distance < context_.size; ++distance) {
    const int s = (context_.rank + distance) % context_.size;
    const Source& source = sources_[s];
    const size_t offset = step * source.step_bytes;
    if (!streams(s) || offset >= source.bytes) continue;
    put(s, offset, streamed(s, step), std::min(source.step_bytes, source.bytes - offset));
  }
}

void CopyingExchange::published_step(size_t offset, size_t bytes) {
  const Source& own = sources_[context_.rank];
  if (own.steps * own.step_bytes < own.bytes || outputs_[context_.rank] == own_piece()) return;
  put(context_.rank, offset, own_piece() + offset, bytes);
}

}  // namespace opensmd
