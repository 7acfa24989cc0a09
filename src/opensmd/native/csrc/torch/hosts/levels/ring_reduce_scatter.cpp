// A large reduce_scatter of several hosts along a ring: the sum for a host's members begins on the host behind it, and
// every host on its way adds its own.
//
//      host 0        host 1        host 2        step
//      for 2 ────►   + for 2 ───►  + for 2       0 to 2: complete on host 2
//      + for 1 ──►   + for 1       for 1 ────►   begun on host 2, complete on host 1
//
// It takes as many bytes and messages as sending sums straight to their hosts (reduce_scatter.cpp), but each host hears
// one other at a time, as in ring.cpp.
#include <memory>
#include <vector>

#include "torch/hosts/levels/in_flight.hpp"
#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/ring_walk.hpp"
#include "torch/hosts/levels/scattered_sum.hpp"

namespace opensmd::levels {
namespace {

class RingReduceScatter : ScatteredSum {
 public:
  RingReduceScatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                    double factor)
      : ScatteredSum(on, calling, ins, counts, out, factor,
                     Parts::of(largest_slice(on.layout, calling.signature, counts), kMostOfPart, kFewestParts,
                               kLeastInRing)),
        walk_{parts_.count(), static_cast<size_t>(on.layout.hosts()) - 1},
        own_(std::make_unique_for_overwrite<char[]>(parts_.each)),
        comparison_(on.agreement, calling.signature, calling.call, on.round()),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() { walk_.run(comparison_, *this); }

 private:
  friend RingWalk;

  struct Travelling {
    std::vector<std::unique_ptr<char[]>> sums;  // by step: first this host's own, then as they arrive
    std::vector<size_t> receives;               // by step, from 1 on
    std::vector<size_t> sends;
  };

  // The members whose sum this host adds to in a step, and then passes on.
  const std::vector<int>& takers(size_t step) const {
    return on_.layout.members(on_.layout.after(static_cast<int>(walk_.last - step)));
  }
  int counterpart(int step) const { return on_.layout.partner(on_.layout.after(step), me_); }

  void expect(size_t index, size_t step) {
    if (step == 0) in_flight_.begin();
    Travelling& part = in_flight_.at(index);
    const int taker = takers(step)[static_cast<size_t>(on_.layout.place())];
    const size_t bytes = part_of_slice(index, taker).bytes;
    part.sums.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    if (step == 0) return;
    part.receives.push_back(
        crossing_.receive(part.sums.back().get(), bytes, counterpart(on_.layout.hosts() - 1)));
  }

  void go_on(size_t index, size_t step) {
    Travelling& part = in_flight_.at(index);
    void* sum = part.sums[step].get();
    void* own = step == 0 ? sum : step == walk_.last ? out_ + part_of_slice(index, me_).offset : own_.get();
    const size_t bytes = add_up_here(index, takers(step), 0, own);
    if (step > 0) crossing_.await_received(part.receives[step - 1]);
    const void* const terms[] = {sum, own};
    if (step == walk_.last) {
      if (bytes > 0) sums_.conclude(&own, 1, terms, 2, bytes);
      return collect(part);
    }
    if (step > 0 && bytes > 0) sums_.combine(&sum, 1, terms, 2, bytes);
    part.sends.push_back(crossing_.send(sum, bytes, counterpart(1)));
  }

  void collect(const Travelling& part) {
    for (size_t send : part.sends) crossing_.await_sent(send);
    in_flight_.end_first();
  }

  const RingWalk walk_;
  const std::unique_ptr<char[]> own_;  // this host's sum, to add to what arrives
  InFlight<Travelling> in_flight_;
  Agreement::Comparison comparison_;
  Crossing crossing_;  // destroyed before the memory it writes to
};

}  // namespace

void ring_reduce_scatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                         double factor) {
  RingReduceScatter(on, calling, ins, counts, out, factor).run();
}

}  // namespace opensmd::levels
