// The engine of every collective that moves pieces between members (and of reduce_scatter, which reduces them on
// arrival). A source's pieces travel in one of four ways, which all members can tell once they have met:
//
//   inline    all its pieces fit its entry line's payload
//   heap      its tensor lies in the zero-copy heap: readers take it from there, then all finish together
//   staged    all its pieces fit its stage at once: written before the entry is posted
//   streamed  through its stage, step by step, as far ahead of the slowest reader as there are slots:
//
//      source   publish 0 ── 1 ── 2 ── 3 ──────── 4 (waits for room)
//      reader        consume 0 ── 1 ── 2 ...
//
// A member that gives but takes nothing begins to publish while it waits for the others, which may still be at the end
// of the previous call.
//
// A piece for all members is written once ("shared"); pieces for single members lie side by side in lanes.
#pragma once

#include "core/memory/copy.hpp"
#include "core/protocol/placement.hpp"

namespace opensmd {

// Who gives how many bytes to whom. All members must agree once they have met; before that, each knows its own row.
class Traffic {
 public:
  virtual ~Traffic() = default;
  virtual size_t bytes(int source, int destination) const = 0;
  virtual size_t largest(int source) const = 0;  // bound of its pieces; equal bounds give equal steps
  virtual bool shared() const = 0;               // each source gives the same piece to all
  virtual int lanes(int size) const = 0;         // destinations of one source: 1 or size - 1
  virtual bool one_way() const { return false; } // a member that gives takes nothing
};

class Exchange {
 public:
  // inputs[d] is this member's piece for member d (the same pointer for all d where shared); null if it gives none.
  Exchange(Context& context, Round& round, const Traffic& traffic, const void* const* inputs);
  virtual ~Exchange() = default;
  void run();

 protected:
  enum class Way : uint8_t { Nothing, Inline, Heap, Staged, Streamed };
  struct Source {
    Way way = Way::Nothing;
    const std::byte* piece = nullptr;  // for this member; where not streamed
    size_t bytes = 0;                  // for this member
    size_t step_bytes = 0;             // where streamed
    uint32_t steps = 0;                // for all members
    uint32_t slots = 0;                // that the steps take turns in
    Placement placement;
  };

  virtual void check_agreement();             // of sizes, once all have met
  virtual void take_direct() = 0;             // everything that is not streamed
  virtual void take_step(uint32_t step) = 0;  // what this step brings
  virtual void published_step(size_t offset, size_t bytes);  // of this member's pieces, now warm in the cache

  const std::byte* streamed(int source, uint32_t step) const;
  const std::byte* own_piece() const { return static_cast<const std::byte*>(inputs_[context_.rank]); }
  bool streams(int source) const { return sources_[source].way == Way::Streamed; }

  Context& context_;
  Round& round_;
  const Traffic& traffic_;
  const void* const* inputs_;
  Source sources_[kMaxMembers];

 private:
  size_t total(int source, size_t padding) const;
  size_t packed_offset(int source, int destination, size_t padding) const;
  size_t lane(int source, int destination) const;
  size_t lane_count() const;
  size_t step_bytes(int source) const;
  size_t slot_bytes(int source) const { return step_bytes(source) * lane_count(); }
  uint32_t steps(int source) const;
  uint32_t slots(int source) const { return stream_slots(context_.arena, slot_bytes(source), steps(source)); }
  std::byte* slot(int source, uint32_t step) const;
  bool place_own_in_heap(Placement& placement) const;
  void pack(std::byte* to, size_t padding) const;
  void offer();
  void find_sources();
  Source find_source(int source) const;
  void stream_ahead();
  void begin_own_stream();
  void stream();
  void publish(uint32_t step);
  bool step_available(uint32_t step) const;
  void wait_for_sources(uint32_t step);
  bool all_consumed(uint32_t steps) const;  // by the others, counted over all calls
  bool room_for(uint32_t step) const;
  void wait_for_room(uint32_t step);

  const bool shared_;
  bool from_memory_ = false;  // what is published is much larger than the caches
  uint32_t base_;
  uint32_t steps_ = 0;
  uint32_t published_ = 0;  // steps of this call
  bool streams_own_ = false;
  bool begun_ = false;  // this member's stream
};

// Pieces go into outputs[source] unchanged; this member's own is copied too, unless it is already there.
class CopyingExchange : public Exchange {
 public:
  CopyingExchange(Context& context, Round& round, const Traffic& traffic, const void* const* inputs,
                  void* const* outputs);

 protected:
  void take_direct() override;
  void take_step(uint32_t step) override;
  void published_step(size_t offset, size_t bytes) override;

 private:
  void put(int source, size_t offset, const std::byte* from, size_t bytes);

  void* const* outputs_;
  bool past_cache_;  // the results are much larger than the caches
  Copy through_cache_ = copy_bytes;
};

}  // namespace opensmd
