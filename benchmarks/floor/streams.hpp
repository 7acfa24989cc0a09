// The other collectives of two ranks, between private tensors: what one rank gives, it copies into a ring that only
// it writes, and the other copies it out. Both cores work at once, piece by piece.
//
// Found by trying, on two cores that share a cache (pieces and lags around these change little, other rings much):
//   - A ring of 2 MiB one way, of 1 MiB both ways, whose position moves on from call to call: in a shorter one a line
//     is written again while its reader still has it, in a longer one it is in no cache any more.
//   - Up to a few MiB both ranks first give all they have to give, then take; what is much larger than the caches
//     is taken one piece after it was given, is read four pages at a time, and leaves past the caches.
#pragma once
#include <algorithm>

#include "flags.hpp"
#include "lines.hpp"

namespace floor_ {

constexpr int64_t kOneWayRing = (2 << 20) / 4, kBothWaysRing = (1 << 20) / 4;

struct Stream {
  Flag given, taken;  // floats since the beginning
  alignas(4096) float ring[kOneWayRing];
};

// How one call's message is cut. Pieces are powers of two and begin at multiples of themselves, so that none is cut by
// the ring's end.
struct Plan {
  static constexpr int64_t kPage = 4096 / 4;

  Plan(int64_t count, int64_t cuts, int64_t largest) : count(count), large(count >= kLarge) {
    if (large) largest = 16 * kPage;
    while (piece < largest && piece * cuts < count) piece *= 2;
    pieces = (count + piece - 1) / piece;
    if (large) lag = 1;
  }
  static Plan one_way(int64_t count) { return Plan(count, 32, 8 * kPage); }
  static Plan both_ways(int64_t count) { return Plan(count, 4, 32 * kPage); }

  int64_t begin(int64_t i) const { return i * piece; }
  int64_t length(int64_t i) const { return std::min(piece, count - begin(i)); }
  int64_t first(int64_t position) const { return (position + piece - 1) / piece * piece; }
  int64_t end(int64_t position) const { return first(position) + pieces * piece; }
  void leave(float* to, const float* from, int64_t n) const { (large ? copy_past_cache : copy)(to, from, n); }

  int64_t count, piece = kPage, pieces, lag = 4;
  bool large;
};

// One rank's end: writes into `out`, reads from `in`.
class Streams {
 public:
  Streams(Stream& out, Stream& in, int64_t ring) : out_(out), in_(in), ring_(ring) {}

  // One rank gives, the other takes.
  void give(const float* data, int64_t count) {
    const Plan plan = Plan::one_way(count);
    for (int64_t i = 0; i < plan.pieces; i++) give_piece(data, plan, i);
    given_ = plan.end(given_);
  }
  void take(float* data, int64_t count) {
    const Plan plan = Plan::one_way(count);
    for (int64_t i = 0; i < plan.pieces; i++) {
      take_piece(plan, i, [&](const float* from, int64_t at, int64_t n) { plan.leave(data + at, from, n); });
    }
    taken_ = plan.end(taken_);
  }

  // Both give `theirs` and take into `out`; `own` goes to `own_out`.
  void exchange(const float* theirs, float* out, const float* own, float* own_out, int64_t count) {
    const Plan plan = Plan::both_ways(count);
    both_ways(theirs, plan, [&](int64_t at, int64_t n) { plan.leave(own_out + at, own + at, n); },
              [&](const float* from, int64_t at, int64_t n) { plan.leave(out + at, from, n); });
  }

  // Both give `theirs`; what comes is added to `own` and goes to `out`.
  void reduce(const float* theirs, float* out, const float* own, int64_t count) {
    const Plan plan = Plan::both_ways(count);
    const auto add = plan.large && aligned(out) ? add_past_cache : floor_::add;
    both_ways(theirs, plan, [](int64_t, int64_t) {},
              [&](const float* from, int64_t at, int64_t n) { add(out + at, from, own + at, n); });
  }

 private:
  template <class Own, class Arrived>
  void both_ways(const float* theirs, const Plan& plan, const Own& own, const Arrived& arrived) {
    for (int64_t i = 0; i < plan.pieces + plan.lag; i++) {
      if (i < plan.pieces) {
        give_piece(theirs, plan, i);
        own(plan.begin(i), plan.length(i));
      }
      if (i >= plan.lag) take_piece(plan, i - plan.lag, arrived);
    }
    given_ = plan.end(given_);
    taken_ = plan.end(taken_);
  }

  void give_piece(const float* data, const Plan& plan, int64_t i) {
    const int64_t at = plan.first(given_) + plan.begin(i);
    wait_for(out_.taken, at + plan.piece - ring_);
    (plan.large ? copy_from_memory : copy)(out_.ring + at % ring_, data + plan.begin(i), plan.length(i));
    raise(out_.given, at + plan.piece);
  }

  template <class Use>
  void take_piece(const Plan& plan, int64_t i, const Use& use) {
    const int64_t at = plan.first(taken_) + plan.begin(i);
    wait_for(in_.given, at + plan.piece);
    use(in_.ring + at % ring_, plan.begin(i), plan.length(i));
    raise(in_.taken, at + plan.piece);
  }

  Stream& out_;
  Stream& in_;
  const int64_t ring_;
  int64_t given_ = 0, taken_ = 0;
};

}  // namespace floor_
