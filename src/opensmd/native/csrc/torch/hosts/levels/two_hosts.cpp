// A large all_reduce of two hosts: each reduces in shared memory, one slice per member that crosses; members with the
// same place exchange their slices, and both add them up; each host gathers the slices in shared memory.
//
//      host 0 ── its sum ──►  host 1      both: host 0's sum + host 1's sum
//             ◄── its sum ──
//
// As many bytes cross each way as where one host makes the sum of a cut and sends it back (all_reduce.cpp), but in one
// step instead of two, with less waiting and half as many messages.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/sliced_sum.hpp"

namespace opensmd::levels {
namespace {

class TwoHostsAllReduce : SlicedSum {
 public:
  TwoHostsAllReduce(Levels& on, const Calling& calling, void* data, double factor)
      : SlicedSum(on, calling, data, calling.signature.reduction, factor),
        parts_(Parts::of(bytes(), kMostOfPart, kFewestParts)),
        slots_(kAhead),
        comparison_(on.agreement, calling.signature, calling.call, on.round()),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    const size_t count = parts_.count();
    for (size_t i = 0; i < std::min(kAhead, count); ++i) expect(i);
    comparison_.meet();
    comparison_.post();
    // While parts are in transit, the one before them is added up.
    for (size_t i = 0; i < count + kOnTheirWay; ++i) {
      if (i < count) give(i);
      if (i == 0) comparison_.conclude();  // meanwhile, the other host's frame has travelled
      if (i >= kOnTheirWay) take(i - kOnTheirWay);
    }
  }

 private:
  static constexpr size_t kOnTheirWay = kAhead - 1;

  struct Slot {
    Slices slices;                     // of the part, for the members of this host
    std::unique_ptr<char[]> arriving;  // the other host's sum of this member's slice
    size_t receive = 0, send = 0;
  };

  Slot& slot(size_t index) { return slots_[index % kAhead]; }
  // Each stream uses one of several network interfaces (wire.hpp): parts alternate.
  static Stream stream_of(size_t index) { return index % 2 == 0 ? Stream::Inputs : Stream::Results; }

  void expect(size_t index) {
    Slot& at = slot(index);
    const auto [offset, bytes] = parts_.part(index);
    at.slices = cut(data_ + offset, bytes, dtype_, takers_of(on_.layout, bytes), on_.local.size());
    if (slice_bytes(at.slices) == 0) return;
    if (!at.arriving) at.arriving = std::make_unique_for_overwrite<char[]>(parts_.each);
    at.receive = crossing_.receive(at.arriving.get(), slice_bytes(at.slices), counterpart(1), stream_of(index));
  }

  void give(size_t index) {
    Slot& at = slot(index);
    add_up_here(at.slices);
    if (slice_bytes(at.slices) == 0) return;
    at.send = crossing_.send(slice(at.slices), slice_bytes(at.slices), counterpart(1), stream_of(index));
  }

  void take(size_t index) {
    Slot& at = slot(index);
    if (slice_bytes(at.slices) > 0) add_up_hosts(at);
    gather_here(at.slices);
    if (index + kAhead < parts_.count()) expect(index + kAhead);
  }

  void add_up_hosts(Slot& at) {
    crossing_.await_received(at.receive);
    crossing_.await_sent(at.send);  // the sum overwrites what is sent
    void* sum = slice(at.slices);
    const void* hosts[] = {sum, at.arriving.get()};
    if (on_.layout.host() != 0) std::swap(hosts[0], hosts[1]);
    sums_.conclude(&sum, 1, hosts, 2, slice_bytes(at.slices));
  }

  const Parts parts_;
  std::vector<Slot> slots_;
  Agreement::Comparison comparison_;
  Crossing crossing_;  // destroyed before the memory it writes to
};

}  // namespace

void two_hosts_all_reduce(Levels& on, const Calling& calling, void* data, double factor) {
  TwoHostsAllReduce(on, calling, data, factor).run();
}

}  // namespace opensmd::levels
