// Large: each host adds up in shared memory, a slice for each member that crosses; members of one place on all hosts
// cut their slice among themselves, send each other what they have of the others' cuts, add up, and send the sums
// back; each host gathers the slices in shared memory. 2 * bytes * (hosts - 1) / hosts leave a host, however many
// members it has.
#include <deque>
#include <memory>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {
namespace {

// Less is not worth several connections at once.
constexpr size_t kSplitBytes = 32u << 10;

// First members send their hosts' sums to all others, and all hosts add them up alike.
void carry_all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  const auto& [signature, call] = calling;
  const size_t count = signature.count, bytes = count * size_of(signature.dtype);
  const TwoSums sums(on.layout, signature.dtype, signature.reduction, factor);
  Agreement::Comparison comparison(on.agreement, signature, call);
  if (comparison.agreed_here()) {
    void* own = comparison.first() ? comparison.payload_for(on.layout.host()) : nullptr;
    on.local.reduce(data, own, count, signature.dtype, sums.here, 0, sums.factor, call);
    comparison.post_to_all(bytes);
  } else {
    comparison.post();
  }
  comparison.conclude();
  if (comparison.first() && bytes > 0) {
    std::vector<const void*> hosts;
    for (int host = 0; host < on.layout.hosts(); ++host) hosts.push_back(comparison.payload(host));
    sums.conclude(&data, 1, hosts.data(), on.layout.hosts(), bytes);
  }
  on.local.broadcast(data, count, signature.dtype, 0, call);
}

class LargeAllReduce {
 public:
  LargeAllReduce(Levels& on, const Calling& calling, void* data, double factor)
      : on_(on),
        calling_(calling),
        dtype_(calling.signature.dtype),
        sums_(on.layout, dtype_, calling.signature.reduction, factor),
        data_(static_cast<char*>(data)),
        parts_(Parts::of(calling.signature.count * size_of(dtype_), kMostOfSum, kFewestParts)),
        crossing_(on.wire, calling.call) {}

  void run() {
    Agreement::Comparison comparison(on_.agreement, calling_.signature, calling_.call);
    comparison.post();
    if (!comparison.agreed_here()) comparison.conclude();
    const size_t count = parts_.count();
    for (size_t i = 0; i < std::min(kAhead, count); ++i) expect(i);
    // Parts follow one another through the three steps, and something is always on its way.
    for (size_t i = 0; i < count + kAhead - 1; ++i) {
      if (i < count) add_up_here(i);
      if (i == 0) comparison.conclude();  // the other hosts' frames have travelled meanwhile
      if (i < count) send_inputs(i);
      if (i >= 1 && i - 1 < count) add_up_hosts(i - 1);
      if (i >= kAhead - 1) collect(i - kAhead + 1);
    }
    crossing_.await_all_sent();
  }

 private:
  struct Travelling {
    Slices slices;  // of the part, for the members of this host
    std::unique_ptr<char[]> inputs;  // from the other hosts, of this member's own cut
    std::vector<size_t> input_receives, result_receives;
  };

  // By place in the order in which this host speaks to the others.
  int counterpart(int step) const {
    return on_.layout.members(on_.layout.after(step))[static_cast<size_t>(on_.layout.place())];
  }

  char* slice(const Travelling& part) const { return part.slices.data[static_cast<size_t>(on_.layout.place())]; }
  size_t slice_bytes(const Travelling& part) const {
    return part.slices.counts[static_cast<size_t>(on_.layout.place())] * size_of(dtype_);
  }
  Part cut_of(const Travelling& part, int host) const {
    return part_of(slice_bytes(part), on_.layout.hosts(), host);
  }

  void expect(size_t index) {
    const auto [offset, bytes] = parts_.part(index);
    const int takers = bytes < kSplitBytes ? 1 : on_.layout.fewest_on_a_host();
    Travelling& part = travelling_.emplace_back();
    part.slices = cut(data_ + offset, bytes, dtype_, takers, on_.local.size());
    if (slice_bytes(part) == 0) return;
    const size_t own = cut_of(part, on_.layout.host()).bytes;
    part.inputs = std::make_unique_for_overwrite<char[]>(own * static_cast<size_t>(on_.layout.hosts()));
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      char* into = part.inputs.get() + own * static_cast<size_t>(on_.layout.after(step));
      part.input_receives.push_back(crossing_.receive(into, own, counterpart(step), Stream::Inputs));
      // Nothing comes back before all that is sent from there has arrived.
      const auto [begin, length] = cut_of(part, on_.layout.after(step));
      part.result_receives.push_back(
          crossing_.receive(slice(part) + begin, length, counterpart(step), Stream::Results));
    }
  }

  Travelling& at(size_t index) { return travelling_[index - collected_]; }

  void add_up_here(size_t index) {
    Travelling& part = at(index);
    on_.local.reduce_scatter(part.slices.inputs(), part.slices.counts.data(), slice(part), dtype_, sums_.here,
                             sums_.factor, calling_.call);
  }

  void send_inputs(size_t index) {
    Travelling& part = at(index);
    if (slice_bytes(part) == 0) return;
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      const auto [begin, length] = cut_of(part, on_.layout.after(step));
      crossing_.send(slice(part) + begin, length, counterpart(step), Stream::Inputs);
    }
  }

  void add_up_hosts(size_t index) {
    Travelling& part = at(index);
    if (slice_bytes(part) == 0) return;
    for (size_t receive : part.input_receives) crossing_.await_received(receive);
    const auto [begin, length] = cut_of(part, on_.layout.host());
    void* sum = slice(part) + begin;
    std::vector<const void*> hosts;
    for (int host = 0; host < on_.layout.hosts(); ++host) {
      hosts.push_back(host == on_.layout.host() ? sum : part.inputs.get() + length * static_cast<size_t>(host));
    }
    if (length > 0) sums_.conclude(&sum, 1, hosts.data(), on_.layout.hosts(), length);
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      crossing_.send(sum, length, counterpart(step), Stream::Results);
    }
  }

  void collect(size_t index) {
    Travelling& part = at(index);
    for (size_t receive : part.result_receives) crossing_.await_received(receive);
    on_.local.all_gather(slice(part), part.slices.outputs(), part.slices.counts.data(), dtype_, calling_.call);
    travelling_.pop_front();
    ++collected_;
    if (index + kAhead < parts_.count()) expect(index + kAhead);
  }

  Levels& on_;
  const Calling& calling_;
  const DType dtype_;
  const TwoSums sums_;
  char* const data_;
  const Parts parts_;
  std::deque<Travelling> travelling_;  // in order, without those collected
  size_t collected_ = 0;
  Crossing crossing_;  // goes before the memory that it writes to
};

}  // namespace

void all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  if (on.carries(calling.signature.count * size_of(calling.signature.dtype))) {
    carry_all_reduce(on, calling, data, factor);
  } else {
    LargeAllReduce(on, calling, data, factor).run();
  }
}

}  // namespace opensmd::levels
