// Large: each host reduces in shared memory what is for another host's members, one slice per member of its own; these
// send the sums there.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/ring_walk.hpp"
#include "torch/hosts/levels/scattered_sum.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {
namespace {

size_t elements_for(const Layout& layout, int host, const size_t* counts) {
  size_t sum = 0;
  for (int member : layout.members(host)) sum += counts[member];
  return sum;
}

size_t most_for_a_host(const Layout& layout, const size_t* counts) {
  size_t most = 0;
  for (int host = 0; host < layout.hosts(); ++host) most = std::max(most, elements_for(layout, host, counts));
  return most;
}

// All slices in a row, grouped by host.
std::unique_ptr<char[]> packed(const Layout& layout, const void* const* ins, const size_t* counts, size_t width,
                               size_t total) {
  auto all = std::make_unique_for_overwrite<char[]>(total * width);
  char* next = all.get();
  for (int host = 0; host < layout.hosts(); ++host) {
    for (int member : layout.members(host)) {
      const size_t bytes = counts[member] * width;
      if (bytes > 0) std::memcpy(next, ins[member], bytes);
      next += bytes;
    }
  }
  return all;
}

void carry_reduce_scatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                          double factor) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t width = size_of(signature.dtype);
  const TwoSums sums(layout, signature.dtype, signature.reduction, factor);
  Agreement::Comparison comparison(on.agreement, signature, call);
  comparison.meet();
  auto all = packed(layout, ins, counts, width, signature.count);
  on.local.reduce(all.get(), comparison.first() ? all.get() : nullptr, signature.count, signature.dtype, sums.here, 0,
                  sums.factor, call);
  const char* given = all.get();
  std::vector<size_t> sizes;
  for (int host = 0; host < layout.hosts(); ++host) {
    sizes.push_back(elements_for(layout, host, counts) * width);
    if (comparison.first() && sizes.back() > 0) std::memcpy(comparison.payload_for(host), given, sizes.back());
    given += sizes.back();
  }
  comparison.post(sizes);
  const size_t bytes = elements_for(layout, layout.host(), counts) * width;
  auto mine = std::make_unique_for_overwrite<char[]>(bytes);
  comparison.conclude(mine.get(), bytes, [&](void* sum) {
    std::vector<const void*> hosts;
    for (int host = 0; host < layout.hosts(); ++host) hosts.push_back(comparison.payload(host));
    sums.conclude(&sum, 1, hosts.data(), layout.hosts(), bytes);
  });
  const char* next = mine.get();
  for (int place = 0; place < layout.place(); ++place) {
    next += counts[layout.here()[static_cast<size_t>(place)]] * width;
  }
  const size_t own = counts[layout.here()[static_cast<size_t>(layout.place())]] * width;
  if (own > 0) std::memcpy(out, next, own);
}

class LargeReduceScatter : ScatteredSum {
 public:
  LargeReduceScatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                     double factor)
      : ScatteredSum(on, calling, ins, counts, out, factor,
                     Parts::of(largest_slice(on.layout, calling.signature, counts), kMostOfPart, kFewestParts)),
        slots_(kAhead),
        comparison_(on.agreement, calling.signature, calling.call,
                    all_give(counts, on.layout.size()) ? on.round() : Route()),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    for (size_t i = 0; i < std::min(kAhead, parts_.count()); ++i) expect(i);
    comparison_.meet();
    comparison_.post();
    // Something is always in transit: the sums of a part leave before the previous part's are waited for.
    for (size_t i = 0; i < parts_.count() + 1; ++i) {
      if (i < parts_.count()) give(i);
      if (i == 0) comparison_.conclude();
      if (i >= 1) take(i - 1);
    }
    crossing_.await_all_sent();
  }

 private:
  struct Slot {
    std::unique_ptr<char[]> arriving, leaving;
    std::vector<size_t> receives, sends;
  };

  Slot& slot(size_t index) { return slots_[index % kAhead]; }

  void expect(size_t index) {
    Slot& at = slot(index);
    const size_t bytes = part_of_slice(index, me_).bytes;
    if (!at.arriving) {
      at.arriving = std::make_unique_for_overwrite<char[]>(bytes * static_cast<size_t>(on_.layout.hosts()));
    }
    at.receives.clear();
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      const int host = on_.layout.after(step);
      at.receives.push_back(crossing_.receive(at.arriving.get() + bytes * static_cast<size_t>(host), bytes,
                                              on_.layout.partner(host, me_)));
    }
  }

  void give(size_t index) {
    Slot& at = slot(index);
    for (size_t send : at.sends) crossing_.await_sent(send);
    at.sends.clear();
    const size_t here = on_.layout.here().size();
    const size_t rows = (static_cast<size_t>(on_.layout.most_on_a_host()) + here - 1) / here;
    if (!at.leaving) {
      const auto hosts = static_cast<size_t>(on_.layout.hosts());
      at.leaving = std::make_unique_for_overwrite<char[]>(parts_.each * rows * hosts);
    }
    char* next = at.leaving.get();
    for (int step = 1; step < on_.layout.hosts(); ++step) {
      const auto& members = on_.layout.members(on_.layout.after(step));
      for (size_t row = 0; row < members.size(); row += here) {
        const size_t bytes = add_up_here(index, members, row, next);
        const size_t mine = row + static_cast<size_t>(on_.layout.place());
        if (mine < members.size()) at.sends.push_back(crossing_.send(next, bytes, members[mine]));
        next += bytes;
      }
    }
  }

  void take(size_t index) {
    Slot& at = slot(index);
    const auto [offset, bytes] = part_of_slice(index, me_);
    void* own = out_ + offset;
    add_up_here(index, on_.layout.here(), 0, own);
    for (size_t receive : at.receives) crossing_.await_received(receive);
    std::vector<const void*> hosts;
    for (int host = 0; host < on_.layout.hosts(); ++host) {
      hosts.push_back(host == on_.layout.host() ? own : at.arriving.get() + bytes * static_cast<size_t>(host));
    }
    if (bytes > 0) sums_.conclude(&own, 1, hosts.data(), on_.layout.hosts(), bytes);
    if (index + kAhead < parts_.count()) expect(index + kAhead);
  }

  std::vector<Slot> slots_;
  Agreement::Comparison comparison_;
  Crossing crossing_;  // destroyed before the memory it writes to
};

bool is_added_up_along_a_ring(const Levels& on, const Signature& signature, const size_t* counts) {
  const Layout& layout = on.layout;
  if (!can_go_along_a_ring(on, signature)) return false;
  return layout.fewest_on_a_host() == layout.most_on_a_host() && all_give(counts, layout.size()) &&
         largest_slice(layout, signature, counts) >= kFewestInRing * kLeastInRing;
}

}  // namespace

void reduce_scatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                    double factor) {
  if (is_added_up_along_a_ring(on, calling.signature, counts)) {
    ring_reduce_scatter(on, calling, ins, counts, out, factor);
  } else if (on.carries_pieces(most_for_a_host(on.layout, counts) * size_of(calling.signature.dtype))) {
    carry_reduce_scatter(on, calling, ins, counts, out, factor);
  } else {
    LargeReduceScatter(on, calling, ins, counts, out, factor).run();
  }
}

}  // namespace opensmd::levels
