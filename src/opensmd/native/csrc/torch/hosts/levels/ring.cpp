// A large all_reduce of several hosts along a ring: a slice is cut once per host, and every host sends one cut at a
// time to the host behind it. A cut goes around twice, less one step: first to be added up, then as a sum.
//
//      host 0      host 1      host 2       step
//      cut 0 ────► + cut 0 ──► + cut 0      1, 2: the sum of cut 0 is complete on host 2
//      sum 0 ◄──────────────── sum 0        3: and comes to hosts 0
//             ───► sum 0                    4: and 1
//
// It takes as many bytes and messages as an exchange between all pairs (all_reduce.cpp), but each host hears one other
// at a time: where all send to one, they queue for its link, and its cores switch between connections. Parts, or pieces
// of the cuts of a single part, follow one another through the steps, so that something is always in transit: two are
// enough for that.
#include <memory>
#include <utility>
#include <vector>

#include "torch/hosts/levels/first_cut.hpp"
#include "torch/hosts/levels/in_flight.hpp"
#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/ring_walk.hpp"
#include "torch/hosts/levels/sliced_sum.hpp"

namespace opensmd::levels {
namespace {

class RingAllReduce : SlicedSum {
 public:
  RingAllReduce(Levels& on, const Calling& calling, void* data, double factor)
      : SlicedSum(on, calling, data, calling.signature.reduction, factor),
        parts_(parts_in_ring(on.layout, bytes())),
        pieces_(pieces_of_cuts(parts_, cuts_of(on.layout))),
        hosts_(static_cast<size_t>(on.layout.hosts())),
        walk_{parts_.count() * pieces_, 2 * (hosts_ - 1)},
        comparison_(on.agreement, calling.signature, calling.call, on.round()),
        first_cut_(on, comparison_, piece_of_cut(parts_.part(0).bytes, on.layout.hosts(), 0, pieces_, 0).bytes),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    walk_.run(comparison_, *this, first_cut_.framed());
    crossing_.await_all_sent();
  }

 private:
  friend RingWalk;

  struct Travelling {
    Slices slices;  // of this piece's part, for the members of this host
    std::vector<std::unique_ptr<char[]>> sums;  // partial sums as they arrive, by step
    std::vector<size_t> receives;               // by step, from 1 on
    std::vector<size_t> sends;                  // of `sums`
  };

  // What arrives in a step, of a piece of a part. What is sent next is the same cut.
  Part cut_of(size_t index, size_t step) {
    const size_t host = (static_cast<size_t>(on_.layout.host()) + 2 * hosts_ - step) % hosts_;
    const size_t bytes = slice_bytes(in_flight_.at(index).slices);
    return piece_of_cut(bytes, on_.layout.hosts(), static_cast<int>(host), pieces_, index % pieces_);
  }
  bool completes(size_t step) const { return step == hosts_ - 1; }

  void expect(size_t index, size_t step) {
    if (step == 0) return begin(index);
    Travelling& part = in_flight_.at(index);
    if (!crosses(part.slices)) return;
    const auto [offset, bytes] = cut_of(index, step);
    char* into = slice(part.slices) + offset;
    if (step < hosts_) {
      part.sums.push_back(std::make_unique_for_overwrite<char[]>(bytes));
      into = part.sums.back().get();
    }
    const bool framed = first_cut_.is(index, step - 1);
    part.receives.push_back(crossing_.receive(into, framed ? 0 : bytes, counterpart(on_.layout.hosts() - 1)));
  }

  void begin(size_t index) {
    const auto [offset, bytes] = parts_.part(index / pieces_);
    in_flight_.begin({cut(data_ + offset, bytes, dtype_, on_.layout.fewest_on_a_host(), on_.local.size()), {}, {}, {}});
  }

  void go_on(size_t index, size_t step) {
    const Slices& slices = in_flight_.at(index).slices;
    if (step == 0 && index % pieces_ == 0) add_up_here(slices);
    if (crosses(slices)) pass_on(index, step);
    if (step == walk_.last) collect(index);
  }

  void pass_on(size_t index, size_t step) {
    Travelling& part = in_flight_.at(index);
    const auto [offset, bytes] = cut_of(index, step);
    void* own = slice(part.slices) + offset;
    if (first_cut_.is(index, step)) return first_cut_.post(own, bytes);
    if (step > 0) crossing_.await_received(part.receives[step - 1]);
    if (step > 0 && first_cut_.is(index, step - 1)) first_cut_.take(part.sums[0].get(), bytes);
    if (step > 0 && step < hosts_ && bytes > 0) {
      void* sum = part.sums[step - 1].get();
      const void* const terms[] = {sum, own};
      void* into = completes(step) ? own : sum;
      (completes(step) ? sums_.conclude : sums_.combine)(&into, 1, terms, 2, bytes);
      if (!completes(step)) {
        part.sends.push_back(crossing_.send(sum, bytes, counterpart(1)));
        return;
      }
    }
    if (step < walk_.last) crossing_.send(own, bytes, counterpart(1));
  }

  void collect(size_t index) {
    const Travelling& part = in_flight_.at(index);
    if (index % pieces_ == pieces_ - 1) gather_here(part.slices);
    for (size_t send : part.sends) crossing_.await_sent(send);
    in_flight_.end_first();
  }

  const Parts parts_;
  const size_t pieces_;  // of each cut of a part
  const size_t hosts_;
  const RingWalk walk_;
  InFlight<Travelling> in_flight_;
  Agreement::Comparison comparison_;
  FirstCut first_cut_;
  Crossing crossing_;  // destroyed before the memory it writes to
};

}  // namespace

void ring_all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  RingAllReduce(on, calling, data, factor).run();
}

}  // namespace opensmd::levels
