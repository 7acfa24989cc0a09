#include "core/algorithms/pipelines/two_shot.hpp"

#include "core/memory/copy.hpp"
#include "core/memory/parts.hpp"
#include "core/protocol/placement.hpp"

namespace opensmd {

namespace {

// Large enough that flags cost little, small enough that what all members have published stays in the caches.
constexpr size_t kSmallestPart = size_t{32} << 10;
constexpr size_t kLargestPart = size_t{128} << 10;
constexpr size_t kLargestPartOfMany = size_t{64} << 10;  // for more than two members
// For arrays that come from memory.
constexpr size_t kFromMemoryBytes = size_t{8} << 20;
constexpr size_t kPartFromMemory = size_t{64} << 10;
// Up to this size, everything that two members move fits into their nearer caches if slots take turns in little memory.
// With more members that is better at any size.
constexpr size_t kSmallBytes = size_t{512} << 10;
// By how many steps publishing is ahead of reducing, and reducing ahead of collecting: a line just written by another
// core is slow to get. Data from memory takes long enough anyway.
constexpr uint32_t kStepsAhead = 4;
constexpr uint32_t kStepsAheadFromMemory = 1;

// How the array is cut, and how many slots the chunks take turns in.
struct Cut {
  size_t chunk;
  uint32_t steps;
  uint32_t slots;
};

size_t part_bytes(size_t bytes, size_t members) {
  if (bytes >= kFromMemoryBytes) return kPartFromMemory;
  const size_t part = round_up(bytes / members / kStepsAhead, kLine);
  return std::clamp(part, kSmallestPart, members > 2 ? kLargestPartOfMany : kLargestPart);
}

Cut cut(const Context& context, size_t bytes) {
  const size_t members = static_cast<size_t>(context.size);
  const Arena& arena = context.arena;
  const size_t chunk = std::min(arena.shape().chunk_bytes, part_bytes(bytes, members) * members);
  const uint32_t steps = static_cast<uint32_t>((bytes + chunk - 1) / chunk);
  const bool close = members > 2 || bytes <= kSmallBytes;
  const uint32_t near = std::max(uint32_t{2}, static_cast<uint32_t>(arena.streams_bytes() / 4 / chunk));
  return {chunk, steps, close ? near : stream_slots(arena, chunk, steps)};
}

class TwoShot {
 public:
  TwoShot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options)
      : context_(context), round_(round), reducer_(reducer), options_(options),
        mine_(context.arena.member(context.rank)), base_(context.steps),
        cut_(cut(context, options.bytes)), from_memory_(options.bytes >= kFromMemoryBytes) {
    for (int i = 0; i < context.size; ++i) first_slots_[i] = announced(round, i).first_slot;
  }

  void run() {
    context_.stage.begin_stream(first_slots_[context_.rank], cut_.chunk, cut_.slots, cut_.steps);
    const uint32_t lead = from_memory_ ? kStepsAheadFromMemory : kStepsAhead;
    while (collected_ < cut_.steps) {
      const bool collectable = collected_ < reduced_ && all_reached(&Member::reduced, collected_ + 1);
      const bool publishable = published_ < cut_.steps && published_ - collected_ < cut_.slots;
      if (collectable && (reduced_ == cut_.steps || reduced_ - collected_ >= lead)) {
        collect();
      } else if (publishable && published_ - reduced_ < lead) {
        publish();
      } else if (reduced_ < published_ && all_reached(&Member::published, reduced_ + 1)) {
        reduce();
      } else if (collectable) {
        collect();
      } else if (publishable) {
        publish();
      } else if (collected_ < reduced_) {
        wait_for_one(&Member::reduced, collected_ + 1);
      } else {
        wait_for_one(&Member::published, reduced_ + 1);
      }
    }
    // Streams of later calls rely on it.
    mine_.consumed.value.store(base_ + cut_.steps, std::memory_order_release);
    context_.steps += cut_.steps;
  }

 private:
  Part chunk_part(uint32_t step, int member) const {
    const size_t offset = step * cut_.chunk;
    return part_of(std::min(cut_.chunk, options_.bytes - offset), context_.size, member);
  }
  std::byte* slot(int member, uint32_t step) const {
    return stream_slot(context_.arena, member, cut_.chunk, (first_slots_[member] + step) % cut_.slots);
  }
  const std::byte* in(uint32_t step) const { return static_cast<const std::byte*>(options_.in) + step * cut_.chunk; }
  std::byte* out(uint32_t step) const { return static_cast<std::byte*>(options_.out) + step * cut_.chunk; }
  bool collects(int member) const { return options_.root < 0 || options_.root == member; }
  int peer(int distance) const { return (context_.rank + distance) % context_.size; }

  void publish() {
    const auto copy = from_memory_ ? copy_from_afar : copy_bytes;
    for (int distance = 1; distance < context_.size; ++distance) {
      const Part part = chunk_part(published_, peer(distance));
      copy(slot(context_.rank, published_) + part.offset, in(published_) + part.offset, part.bytes);
    }
    ++published_;
    round_.set(mine_.published, base_ + published_);
  }

  void reduce() {
    const Part part = chunk_part(reduced_, context_.rank);
    const void* inputs[kMaxMembers];
    for (int i = 0; i < context_.size; ++i) {
      inputs[i] = (i == context_.rank ? in(reduced_) : slot(i, reduced_)) + part.offset;
    }
    void* outputs[kMaxMembers];
    int count = 0;
    if (collects(context_.rank)) outputs[count++] = out(reduced_) + part.offset;
    for (int distance = 1; distance < context_.size; ++distance) {
      if (collects(peer(distance))) outputs[count++] = slot(peer(distance), reduced_) + part.offset;
    }
    reducer_(outputs, count, inputs, context_.size, part.bytes, options_.factors);
    ++reduced_;
    round_.set(mine_.reduced, base_ + reduced_);
  }

  void collect() {
    for (int distance = 1; distance < context_.size && collects(context_.rank); ++distance) {
      const Part part = chunk_part(collected_, peer(distance));
      copy_bytes(out(collected_) + part.offset, slot(context_.rank, collected_) + part.offset, part.bytes);
    }
    ++collected_;
  }

  bool all_reached(Flag Member::* flag, uint32_t step) const {
    for (int distance = 1; distance < context_.size; ++distance) {
      const Flag& theirs = context_.arena.member(peer(distance)).*flag;
      if (!reached(theirs.value.load(std::memory_order_acquire), base_ + step)) return false;
    }
    return true;
  }

  void wait_for_one(Flag Member::* flag, uint32_t step) {
    for (int distance = 1; distance < context_.size; ++distance) {
      const Flag& theirs = context_.arena.member(peer(distance)).*flag;
      if (reached(theirs.value.load(std::memory_order_acquire), base_ + step)) continue;
      round_.wait(theirs, base_ + step, peer(distance));
      return;
    }
  }

  Context& context_;
  Round& round_;
  const Reducer& reducer_;
  const TwoShotOptions options_;
  Member& mine_;
  const uint32_t base_;
  const Cut cut_;
  const bool from_memory_;
  uint32_t first_slots_[kMaxMembers];
  uint32_t published_ = 0;
  uint32_t reduced_ = 0;
  uint32_t collected_ = 0;
};

}  // namespace

uint32_t two_shot_slot(const Context& context, size_t bytes) {
  const Cut how = cut(context, bytes);
  return context.stage.first_slot(how.chunk, how.slots);
}

void two_shot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options) {
  TwoShot(context, round, reducer, options).run();
}

}  // namespace opensmd
