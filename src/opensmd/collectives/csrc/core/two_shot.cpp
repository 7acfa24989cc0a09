#include "two_shot.hpp"

#include "copy.hpp"
#include "parts.hpp"

namespace opensmd {

namespace {

constexpr uint32_t kSlots = 2;
// Small enough that two chunks of all members stay in the cores' own caches, large enough that flags cost nothing.
constexpr size_t kPartBytes = size_t{64} << 10;

class TwoShot {
 public:
  TwoShot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options)
      : context_(context), round_(round), reducer_(reducer), options_(options),
        mine_(context.arena.member(context.rank)), base_(context.steps),
        chunk_(std::min(context.arena.shape().chunk_bytes, kPartBytes * static_cast<size_t>(context.size))),
        steps_(static_cast<uint32_t>((options.bytes + chunk_ - 1) / chunk_)) {}

  void run() {
    context_.stage.reserve_streams(std::min(steps_, kSlots) * chunk_);
    while (collected_ < steps_) {
      // Finishing old steps first frees slots for everybody.
      if (collected_ < reduced_ && all_reached(&Member::reduced, collected_ + 1)) {
        collect();
      } else if (reduced_ < published_ && all_reached(&Member::published, reduced_ + 1)) {
        reduce();
      } else if (published_ < steps_ && published_ - collected_ < kSlots) {
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
    return stream_slot(context_.arena, member, chunk_, step % kSlots);
  }
  const std::byte* in(uint32_t step) const { return static_cast<const std::byte*>(options_.in) + step * chunk_; }
  std::byte* out(uint32_t step) const { return static_cast<std::byte*>(options_.out) + step * chunk_; }
  bool collects(int member) const { return options_.root < 0 || options_.root == member; }
  int peer(int distance) const { return (context_.rank + distance) % context_.size; }

  void publish() {
    for (int distance = 1; distance < context_.size; ++distance) {
      const Part part = chunk_part(published_, peer(distance));
      copy_bytes(slot(context_.rank, published_) + part.offset, in(published_) + part.offset, part.bytes);
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
  uint32_t published_ = 0;
  uint32_t reduced_ = 0;
  uint32_t collected_ = 0;
};

}  // namespace

void two_shot(Context& context, Round& round, const Reducer& reducer, const TwoShotOptions& options) {
  TwoShot(context, round, reducer, options).run();
}

}  // namespace opensmd
