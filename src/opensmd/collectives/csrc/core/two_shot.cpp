#include "two_shot.hpp"

#include "copy.hpp"
#include "parts.hpp"
#include "placement.hpp"

namespace opensmd {

namespace {

// Large enough that flags cost little, small enough that what all members have published stays in the caches.
constexpr size_t kSmallestPart = size_t{32} << 10;
constexpr size_t kLargestPart = size_t{128} << 10;
// Arrays that come from memory.
constexpr size_t kFromMemoryBytes = size_t{8} << 20;
constexpr size_t kPartFromMemory = size_t{64} << 10;
// How many steps publishing is ahead of reducing, and reducing of collecting: a line that another core has only just
// written is slow to get. What comes from memory takes long enough as it is.
constexpr uint32_t kLead = 4;
constexpr uint32_t kLeadFromMemory = 1;

size_t chunk_bytes(const Context& context, size_t bytes) {
  const size_t members = static_cast<size_t>(context.size);
  const size_t part = bytes >= kFromMemoryBytes
                          ? kPartFromMemory
                          : std::clamp(round_up(bytes / members / kLead, kLine), kSmallestPart, kLargestPart);
  return std::min(context.arena.shape().chunk_bytes, part * members);
}

uint32_t step_count(size_t bytes, size_t chunk) { return static_cast<uint32_t>((bytes + chunk - 1) / chunk); }

class TwoShot {
 public:
  TwoShot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options)
      : context_(context), round_(round), reducer_(reducer), options_(options),
        mine_(context.arena.member(context.rank)), base_(context.steps),
        chunk_(chunk_bytes(context, options.bytes)), steps_(step_count(options.bytes, chunk_)),
        slots_(stream_slots(context.arena, chunk_, steps_)), from_memory_(options.bytes >= kFromMemoryBytes) {
    for (int i = 0; i < context.size; ++i) first_slots_[i] = announced(round, i).first_slot;
  }

  void run() {
    context_.stage.begin_stream(first_slots_[context_.rank], chunk_, steps_);
    const uint32_t lead = from_memory_ ? kLeadFromMemory : kLead;
    while (collected_ < steps_) {
      const bool collectable = collected_ < reduced_ && all_reached(&Member::reduced, collected_ + 1);
      const bool publishable = published_ < steps_ && published_ - collected_ < slots_;
      if (collectable && (reduced_ == steps_ || reduced_ - collected_ >= lead)) {
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
    // Streams of later calls count on it.
    mine_.consumed.value.store(base_ + steps_, std::memory_order_release);
    context_.steps += steps_;
  }

 private:
  Part chunk_part(uint32_t step, int member) const {
    const size_t offset = step * chunk_;
    return part_of(std::min(chunk_, options_.bytes - offset), context_.size, member);
  }
  std::byte* slot(int member, uint32_t step) const {
    return stream_slot(context_.arena, member, chunk_, (first_slots_[member] + step) % slots_);
  }
  const std::byte* in(uint32_t step) const { return static_cast<const std::byte*>(options_.in) + step * chunk_; }
  std::byte* out(uint32_t step) const { return static_cast<std::byte*>(options_.out) + step * chunk_; }
  bool collects(int member) const { return options_.root < 0 || options_.root == member; }
  int peer(int distance) const { return (context_.rank + distance) % context_.size; }

  void publish() {
    const auto copy = from_memory_ ? copy_from_memory : copy_bytes;
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
  const size_t chunk_;
  const uint32_t steps_;
  const uint32_t slots_;  // that the steps take turns in
  const bool from_memory_;
  uint32_t first_slots_[kMaxMembers];
  uint32_t published_ = 0;
  uint32_t reduced_ = 0;
  uint32_t collected_ = 0;
};

}  // namespace

uint32_t two_shot_slot(const Context& context, size_t bytes) {
  const size_t chunk = chunk_bytes(context, bytes);
  return context.stage.first_slot(chunk, step_count(bytes, chunk));
}

void two_shot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options) {
  TwoShot(context, round, reducer, options).run();
}

}  // namespace opensmd
