// Large: each host reduces in shared memory, one slice per member that crosses; the members with the same place on all
// hosts cut their slice among themselves, send each other their share of the others' cuts, add up, and return the sums;
// each host gathers the slices in shared memory. 2 * bytes * (hosts - 1) / hosts leave a host, however many members it
// has. Cuts and sums may be coded between hosts: the member that makes a sum keeps the value that the others decode.
//
// Here each host sends to all others at once. Where waiting costs less than queueing for their links, it sends to one
// at a time (ring.cpp, turns.cpp).
#include <memory>
#include <utility>
#include <vector>

#include "torch/hosts/levels/coding.hpp"
#include "torch/hosts/levels/in_flight.hpp"
#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/ring_walk.hpp"
#include "torch/hosts/levels/sliced_sum.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {
namespace {

// The factors of the members' numbers, and how they are added up.
struct Adding {
  Reduction reduction;
  double factor;
};

// First members send their host's sum to all others, and every host adds them up alike.
void carry_all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  const auto& [signature, call] = calling;
  const size_t count = signature.count, bytes = count * size_of(signature.dtype);
  const TwoSums sums(on.layout, signature.dtype, signature.reduction, factor);
  Agreement::Comparison comparison(on.agreement, signature, call);
  comparison.meet();
  void* own = comparison.first() ? comparison.payload_for(on.layout.host()) : nullptr;
  on.local.reduce(data, own, count, signature.dtype, sums.here, 0, sums.factor, call);
  comparison.post_to_all(bytes);
  comparison.conclude(data, bytes, [&](void* at) {
    std::vector<const void*> hosts;
    for (int host = 0; host < on.layout.hosts(); ++host) hosts.push_back(comparison.payload(host));
    sums.conclude(&at, 1, hosts.data(), on.layout.hosts(), bytes);
  });
}

// As above. Every host decodes all hosts' sums, including its own.
void carry_coded(Levels& on, const Calling& calling, void* data, const Adding& adding, const Coding& coding) {
  const auto& [signature, call] = calling;
  const size_t count = signature.count, bytes = count * size_of(signature.dtype);
  const TwoSums sums(on.layout, signature.dtype, adding.reduction, adding.factor);
  Agreement::Comparison comparison(on.agreement, signature, call);
  comparison.meet();
  void* own = comparison.first() ? data : nullptr;
  on.local.reduce(data, own, count, signature.dtype, sums.here, 0, sums.factor, call);
  if (comparison.first()) coding.encode(comparison.payload_for(on.layout.host()), data, bytes);
  comparison.post_to_all(coding.bytes(bytes));
  comparison.conclude(data, bytes, [&](void* at) {
    const auto all = static_cast<size_t>(on.layout.hosts());
    auto decoded = std::make_unique_for_overwrite<char[]>(bytes * all);
    std::vector<const void*> hosts;
    for (size_t host = 0; host < all; ++host) {
      coding.decode(decoded.get() + bytes * host, comparison.payload(static_cast<int>(host)), bytes);
      hosts.push_back(decoded.get() + bytes * host);
    }
    sums.conclude(&at, 1, hosts.data(), on.layout.hosts(), bytes);
  });
}

// The order in which hosts are added up. Along a ring, cut i begins on host i, and each host adds to the previous one's
// sum. A sum that may go along a ring is cut and added up in that order whichever way it goes, so that results have the
// same bits.
enum class Order { OfHosts, OfRing };

class LargeAllReduce : SlicedSum {
 public:
  LargeAllReduce(Levels& on, const Calling& calling, void* data, const Adding& adding, Order order,
                 const Coding& coding = {})
      : SlicedSum(on, calling, data, adding.reduction, adding.factor),
        coding_(coding),
        order_(order),
        parts_(order == Order::OfRing ? parts_in_ring(on.layout, bytes())
                                      : Parts::of(bytes(), kMostOfSum, kFewestParts,
                                                  coding_.none() ? on.least_part : kLeastOfSum)),
        pieces_(order == Order::OfRing && bytes() >= on.least_part ? pieces_of_cuts(parts_, cuts_of(on.layout)) : 1),
        comparison_(on.agreement, calling.signature, calling.call, on.round()),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    const size_t count = parts_.count() * pieces_;
    for (size_t i = 0; i < std::min(kAhead, count); ++i) expect(i);
    comparison_.meet();
    comparison_.post();
    // Parts follow one another through the three steps, so that something is always in transit.
    for (size_t i = 0; i < count + kAhead - 1; ++i) {
      if (i < count && i % pieces_ == 0) add_up_here(in_flight_.at(i).slices);
      if (i < count) send_inputs(i);
      if (i == 0) comparison_.conclude();  // meanwhile, the other hosts' frames have travelled
      if (i >= 1 && i - 1 < count) add_up_hosts(i - 1);
      if (i >= kAhead - 1) collect(i - kAhead + 1);
    }
    crossing_.await_all_sent();
  }

 private:
  struct Travelling {
    Slices slices;  // of this piece's part, for the members of this host
    size_t piece;
    std::unique_ptr<char[]> inputs;  // from the other hosts, for this member's own cut
    std::unique_ptr<char[]> leaving, results;  // coded, by host: cuts for it, or this host's sum; its sums
    std::vector<size_t> input_receives, result_receives;
  };

  int takers(size_t bytes) const {
    return order_ == Order::OfRing ? on_.layout.fewest_on_a_host() : takers_of(on_.layout, bytes);
  }
  Part cut_of(const Travelling& part, int host) const {
    return piece_of_cut(slice_bytes(part.slices), on_.layout.hosts(), host, pieces_, part.piece);
  }

  void expect(size_t index) {
    const auto [offset, bytes] = parts_.part(index / pieces_);
    Travelling& part = in_flight_.begin();
    part.piece = index % pieces_;
    part.slices = cut(data_ + offset, bytes, dtype_, takers(bytes), on_.local.size());
    if (!crosses(part.slices)) return;
    const size_t own = coding_.bytes(cut_of(part, on_.layout.host()).bytes);
    const auto hosts = static_cast<size_t>(on_.layout.hosts());
    part.inputs = std::make_unique_for_overwrite<char[]>(own * hosts);
    if (!coding_.none()) {
      part.leaving = std::make_unique_for_overwrite<char[]>(most_of_code(part) * hosts);
      part.results = std::make_unique_for_overwrite<char[]>(most_of_code(part) * hosts);
    }
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      char* into = part.inputs.get() + own * static_cast<size_t>(on_.layout.after(step));
      part.input_receives.push_back(crossing_.receive(into, own, counterpart(step), Stream::Inputs));
      // Nothing comes back before everything sent from there has arrived.
      const auto [begin, length] = cut_of(part, on_.layout.after(step));
      char* result = coding_.none() ? slice(part.slices) + begin : code_of(part.results, part, on_.layout.after(step));
      part.result_receives.push_back(
          crossing_.receive(result, coding_.bytes(length), counterpart(step), Stream::Results));
    }
  }

  // For one host's cut.
  size_t most_of_code(const Travelling& part) const { return coding_.bytes(cut_of(part, 0).bytes + kLine); }
  char* code_of(const std::unique_ptr<char[]>& codes, const Travelling& part, int host) const {
    return codes.get() + most_of_code(part) * static_cast<size_t>(host);
  }

  void send_inputs(size_t index) {
    Travelling& part = in_flight_.at(index);
    if (!crosses(part.slices)) return;
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      const auto [begin, length] = cut_of(part, on_.layout.after(step));
      char* cut = slice(part.slices) + begin;
      if (!coding_.none()) {
        char* code = code_of(part.leaving, part, on_.layout.after(step));
        coding_.encode(code, cut, length);
        cut = code;
      }
      crossing_.send(cut, coding_.bytes(length), counterpart(step), Stream::Inputs);
    }
  }

  void add_up_hosts(size_t index) {
    Travelling& part = in_flight_.at(index);
    if (!crosses(part.slices)) return;
    for (size_t receive : part.input_receives) crossing_.await_received(receive);
    const auto [begin, length] = cut_of(part, on_.layout.host());
    void* sum = slice(part.slices) + begin;
    decode_inputs(part, length);
    std::vector<const void*> hosts;
    const char* inputs = coding_.none() ? part.inputs.get() : decoded_.data();
    const int first = order_ == Order::OfRing ? on_.layout.host() : 0;
    for (int step = 0; step < on_.layout.hosts(); ++step) {
      const int host = (first + step) % on_.layout.hosts();
      hosts.push_back(host == on_.layout.host() ? sum : inputs + length * static_cast<size_t>(host));
    }
    if (length > 0) sums_.conclude(&sum, 1, hosts.data(), on_.layout.hosts(), length);
    if (!coding_.none()) {
      char* code = code_of(part.leaving, part, on_.layout.host());
      coding_.encode_and_round(code, sum, length);
      sum = code;
    }
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      crossing_.send(sum, coding_.bytes(length), counterpart(step), Stream::Results);
    }
  }

  void decode_inputs(const Travelling& part, size_t length) {
    if (coding_.none()) return;
    decoded_.resize(length * static_cast<size_t>(on_.layout.hosts()));
    const size_t code = coding_.bytes(length);
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      const auto host = static_cast<size_t>(on_.layout.after(step));
      coding_.decode(decoded_.data() + length * host, part.inputs.get() + code * host, length);
    }
  }

  void decode_results(const Travelling& part) {
    if (coding_.none() || slice_bytes(part.slices) == 0) return;
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      const int host = on_.layout.after(step);
      const auto [begin, length] = cut_of(part, host);
      coding_.decode(slice(part.slices) + begin, code_of(part.results, part, host), length);
    }
  }

  void collect(size_t index) {
    Travelling& part = in_flight_.at(index);
    for (size_t receive : part.result_receives) crossing_.await_received(receive);
    decode_results(part);
    if (part.piece == pieces_ - 1) gather_here(part.slices);
    left_.push_back(std::move(part.leaving));
    in_flight_.end_first();
    if (index + kAhead < parts_.count() * pieces_) expect(index + kAhead);
  }

  const Coding coding_;
  const Order order_;
  const Parts parts_;
  const size_t pieces_;  // of each cut of a part
  Agreement::Comparison comparison_;
  InFlight<Travelling> in_flight_;
  std::vector<char> decoded_;
  std::vector<std::unique_ptr<char[]>> left_;  // codes of collected parts that a slow host may still have to receive
  Crossing crossing_;  // destroyed before the memory it writes to
};

// Whether hosts may take turns: the data exceeds what any frame carries, and cuts are large enough.
bool may_take_turns(const Levels& on, size_t bytes, size_t least) {
  const size_t others = static_cast<size_t>(on.layout.hosts()) - 1, part = parts_in_ring(on.layout, bytes).each;
  return on.framed && others > 1 && bytes > kMostToAll / others && part / cuts_of(on.layout) >= least;
}

}  // namespace

void all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  const size_t bytes = calling.signature.count * size_of(calling.signature.dtype);
  const bool by_ring = can_go_along_a_ring(on, calling.signature);
  const bool may = may_take_turns(on, bytes, by_ring ? kLeastOfRing : kLeastOfTurn);
  if (on.carries(bytes)) {
    carry_all_reduce(on, calling, data, factor);
  } else if (on.layout.hosts() == 2) {
    two_hosts_all_reduce(on, calling, data, factor);
  } else if (may && by_ring && bytes >= on.ring_from) {
    ring_all_reduce(on, calling, data, factor);
  } else if (may && !by_ring && bytes >= on.turns_from) {
    turns_all_reduce(on, calling, data, factor);
  } else {
    const Order order = may && by_ring ? Order::OfRing : Order::OfHosts;
    LargeAllReduce(on, calling, data, {calling.signature.reduction, factor}, order).run();
  }
}

// Averages are divided before coding, so that no sum is too large for the code.
void all_reduce_compressed(Levels& on, const Calling& calling, float* data, Compression compression, float* residual) {
  const bool divides = calling.signature.reduction == Reduction::Average;
  const Adding adding{divides ? Reduction::PremulSum : Reduction::Sum, divides ? 1.0 / on.layout.size() : 1.0};
  const Coding coding(compression, data, residual, adding.factor);
  if (on.carries(coding.bytes(calling.signature.count * sizeof(float)))) {
    carry_coded(on, calling, data, adding, coding);
  } else {
    LargeAllReduce(on, calling, data, adding, Order::OfHosts, coding).run();
  }
}

}  // namespace opensmd::levels
