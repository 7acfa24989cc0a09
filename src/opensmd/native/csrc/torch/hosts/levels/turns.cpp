// A large all_reduce of several hosts that take turns: as in all_reduce.cpp, every host sends each other host its share
// of that one's cut, and adds up what arrives for its own, but in each step it sends to one host and hears one. Sums
// then go along a ring.
//
//      step      1       2       3       4       5       6
//      host 0    1 ► 1   2 ► 2   3 ► 3   0 ► 1   3 ► 1   2 ► 1
//      host 1    2 ► 2   3 ► 3   0 ► 0   1 ► 2   0 ► 2   3 ► 2      which cut goes to which host: inputs, and then sums
//
// For sums that a ring (ring.cpp) would round or let overflow on every host: here a cut is added up once. Late hosts
// get in each other's way, as they do not along a ring; so parts are small, and only what must goes to all. Parts
// follow one another through the steps, so that something is always in transit.
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

static_assert(kMostOfTurn < kShort, "all cuts go the way of short messages");

class TurnsAllReduce : SlicedSum {
 public:
  TurnsAllReduce(Levels& on, const Calling& calling, void* data, double factor)
      : SlicedSum(on, calling, data, calling.signature.reduction, factor),
        parts_(Parts::in_turns(bytes(), cuts_of(on.layout))),
        others_(static_cast<size_t>(on.layout.hosts()) - 1),
        walk_{parts_.count(), 2 * others_},
        comparison_(on.agreement, calling.signature, calling.call, on.round()),
        first_cut_(on, comparison_, part_of(parts_.part(0).bytes, on.layout.hosts(), 0).bytes),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    walk_.run(comparison_, *this, first_cut_.framed());
    crossing_.await_all_sent();
  }

 private:
  friend RingWalk;

  struct Travelling {
    Slices slices;  // of the part, for the members of this host
    std::unique_ptr<char[]> inputs;  // for this member's own cut, by step
    std::vector<size_t> receives;    // by step, from 1 on
  };

  Part cut_of(const Travelling& part, int host) const {
    return part_of(slice_bytes(part.slices), on_.layout.hosts(), host);
  }
  Part own_cut(const Travelling& part) const { return cut_of(part, on_.layout.host()); }
  // The sum that arrives in a step along the ring, and leaves after it.
  Part sum_of(const Travelling& part, size_t step) const {
    return cut_of(part, on_.layout.after(on_.layout.hosts() - static_cast<int>(step - others_)));
  }
  char* input(const Travelling& part, size_t step) const {
    return part.inputs.get() + own_cut(part).bytes * (step - 1);
  }

  void expect(size_t index, size_t step) {
    if (step == 0) return begin(index);
    Travelling& part = in_flight_.at(index);
    if (!crosses(part.slices)) return;
    if (step <= others_) {
      const int from = on_.layout.hosts() - static_cast<int>(step);
      const size_t bytes = first_cut_.is(index, step - 1) ? 0 : own_cut(part).bytes;
      part.receives.push_back(crossing_.receive(input(part, step), bytes, counterpart(from), Stream::Inputs));
      return;
    }
    const auto [offset, bytes] = sum_of(part, step);
    // Nothing comes back before everything sent from there has arrived.
    part.receives.push_back(
        crossing_.receive(slice(part.slices) + offset, bytes, counterpart(on_.layout.hosts() - 1), Stream::Results));
  }

  void begin(size_t index) {
    const auto [offset, bytes] = parts_.part(index);
    Travelling& part = in_flight_.begin();
    part.slices = cut(data_ + offset, bytes, dtype_, on_.layout.fewest_on_a_host(), on_.local.size());
    if (crosses(part.slices)) part.inputs = std::make_unique_for_overwrite<char[]>(own_cut(part).bytes * others_);
  }

  void go_on(size_t index, size_t step) {
    Travelling& part = in_flight_.at(index);
    if (step == 0) add_up_here(part.slices);
    if (crosses(part.slices)) take_turn(index, step);
    if (step < walk_.last) return;
    gather_here(part.slices);
    in_flight_.end_first();
  }

  void take_turn(size_t index, size_t step) {
    Travelling& part = in_flight_.at(index);
    if (step > 0) crossing_.await_received(part.receives[step - 1]);
    if (step > 0 && first_cut_.is(index, step - 1)) first_cut_.take(input(part, 1), own_cut(part).bytes);
    if (step == others_) add_up_hosts(part);
    if (step == walk_.last) return;
    const bool sums = step >= others_;
    const int to = sums ? 1 : static_cast<int>(step) + 1;
    const auto [offset, bytes] = sums ? sum_of(part, step) : cut_of(part, on_.layout.after(to));
    const void* cut = slice(part.slices) + offset;
    if (first_cut_.is(index, step)) return first_cut_.post(cut, bytes);
    crossing_.send(cut, bytes, counterpart(to), sums ? Stream::Results : Stream::Inputs);
  }

  void add_up_hosts(const Travelling& part) {
    const auto [offset, bytes] = own_cut(part);
    void* sum = slice(part.slices) + offset;
    std::vector<const void*> hosts(others_ + 1, sum);
    for (size_t step = 1; step <= others_; ++step) {
      const int from = on_.layout.after(on_.layout.hosts() - static_cast<int>(step));
      hosts[static_cast<size_t>(from)] = input(part, step);
    }
    if (bytes > 0) sums_.conclude(&sum, 1, hosts.data(), on_.layout.hosts(), bytes);
  }

  const Parts parts_;
  const size_t others_;
  const RingWalk walk_;
  InFlight<Travelling> in_flight_;
  Agreement::Comparison comparison_;
  FirstCut first_cut_;
  Crossing crossing_;  // destroyed before the memory it writes to
};

}  // namespace

void turns_all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  TurnsAllReduce(on, calling, data, factor).run();
}

}  // namespace opensmd::levels
