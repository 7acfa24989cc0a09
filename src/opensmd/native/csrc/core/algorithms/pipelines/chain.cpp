#include "core/algorithms/pipelines/chain.hpp"

#include <algorithm>

#include "core/memory/copy.hpp"

namespace opensmd {

namespace {

// Large enough that changing from one member to the next costs little, small enough that a slot stays in a core's cache.
constexpr size_t kChunk = size_t{128} << 10;

class Chain {
 public:
  Chain(Context& context, Round& round, const ChainOptions& options)
      : context_(context), round_(round), data_(static_cast<std::byte*>(options.data)), bytes_(options.bytes),
        partial_(options.dtype, options.reduction == Reduction::Average ? Reduction::Sum : options.reduction,
                 context.size),
        complete_(options.dtype, options.reduction, context.size), mine_(context.arena.member(context.rank)),
        base_(context.steps), last_(context.size - 1),
        chunk_(std::min(context.arena.shape().chunk_bytes, kChunk)),
        slots_(static_cast<uint32_t>(context.arena.streams_bytes() / chunk_)),
        steps_(static_cast<uint32_t>((options.bytes + chunk_ - 1) / chunk_)) {}

  void run() {
    if (context_.rank == 0) context_.stage.begin_stream(0, chunk_, slots_, steps_);
    while (collected_ < steps_) {
      if (may_add()) {
        add();
      } else if (may_collect()) {
        collect();
      } else {
        wait();
      }
    }
    context_.steps += steps_;
  }

 private:
  Member& last() const { return context_.arena.member(last_); }
  std::byte* slot(uint32_t step) const { return stream_slot(context_.arena, 0, chunk_, step % slots_); }
  std::byte* at(uint32_t step) const { return data_ + step * chunk_; }
  size_t length(uint32_t step) const { return std::min(chunk_, bytes_ - step * chunk_); }
  bool has_reached(const Flag& flag, uint32_t step) const {
    return reached(flag.value.load(std::memory_order_acquire), base_ + step);
  }

  bool may_collect() const { return collected_ < added_ && has_reached(last().published, collected_ + 1); }
  bool may_add() const {
    if (added_ == steps_) return false;
    if (context_.rank > 0) return has_reached(context_.arena.member(context_.rank - 1).published, added_ + 1);
    return slowest_reader() < 0;
  }

  // A member that has not collected what lies in the slot of member 0's next chunk; -1: none.
  int slowest_reader() const {
    for (int i = last_; added_ >= slots_ && i >= 0; --i) {
      if (!has_reached(context_.arena.member(i).consumed, added_ + 1 - slots_)) return i;
    }
    return -1;
  }

  void add() {
    std::byte* const sum = slot(added_);
    std::byte* const own = at(added_);
    if (context_.rank == 0) {
      copy_bytes(sum, own, length(added_));
    } else {
      const void* const inputs[] = {sum, own};
      void* const outputs[] = {sum, own};
      const bool completes = context_.rank == last_;
      (completes ? complete_ : partial_)(outputs, completes ? 2 : 1, inputs, 2, length(added_));
    }
    ++added_;
    round_.set(mine_.published, base_ + added_);
  }

  void collect() {
    const auto copy = bytes_ * static_cast<size_t>(context_.size) >= kPastCacheBytes ? copy_past_cache : copy_bytes;
    if (context_.rank != last_) copy(at(collected_), slot(collected_), length(collected_));
    ++collected_;
    round_.set(mine_.consumed, base_ + collected_);
  }

  void wait() {
    if (added_ == steps_ || added_ - collected_ == slots_) {
      round_.wait(last().published, base_ + collected_ + 1, last_);
    } else if (context_.rank > 0) {
      round_.wait(context_.arena.member(context_.rank - 1).published, base_ + added_ + 1, context_.rank - 1);
    } else if (const int reader = slowest_reader(); reader > 0) {
      round_.wait(context_.arena.member(reader).consumed, base_ + added_ + 1 - slots_, reader);
    }
  }

  Context& context_;
  Round& round_;
  std::byte* const data_;
  const size_t bytes_;
  const Reducer partial_;   // on all members but the last
  const Reducer complete_;  // on the last
  Member& mine_;
  const uint32_t base_;
  const int last_;
  const size_t chunk_;
  const uint32_t slots_;
  const uint32_t steps_;
  uint32_t added_ = 0;
  uint32_t collected_ = 0;
};

}  // namespace

void chain(Context& context, Round& round, const ChainOptions& options) { Chain(context, round, options).run(); }

}  // namespace opensmd
