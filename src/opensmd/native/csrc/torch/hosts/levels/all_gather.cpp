// Large: every member sends its piece to one member of each other host, which shares it in shared memory. Pieces go in
// parts, so that sharing overlaps with transfer. Among more than two hosts, large pieces go along a ring, as in
// ring.cpp: each host passes on what it receives.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"

namespace opensmd::levels {
namespace {

size_t count_on(const Layout& layout, int host, const size_t* counts) {
  size_t sum = 0;
  for (int member : layout.members(host)) sum += counts[member];
  return sum;
}

std::vector<void*> outs_on(const Layout& layout, int host, void* const* outs) {
  std::vector<void*> found;
  for (int member : layout.members(host)) found.push_back(outs[member]);
  return found;
}

std::vector<size_t> counts_on(const Layout& layout, int host, const size_t* counts) {
  std::vector<size_t> found;
  for (int member : layout.members(host)) found.push_back(counts[member]);
  return found;
}

void share_here(Levels& on, const Calling& calling, const void* in, void* const* outs, const size_t* counts) {
  const int host = on.layout.host();
  on.local.all_gather(in, outs_on(on.layout, host, outs).data(), counts_on(on.layout, host, counts).data(),
                      calling.signature.dtype, calling.call);
}

// The other hosts' pieces, in a row on the first member, shared with its host.
void conclude_with_payloads(Levels& on, const Calling& calling, Agreement::Comparison& comparison, void* const* outs,
                            const size_t* counts) {
  const Layout& layout = on.layout;
  const size_t width = size_of(calling.signature.dtype);
  size_t elsewhere = 0;
  for (int step = 1; step < layout.hosts(); ++step) elsewhere += count_on(layout, layout.after(step), counts);
  auto pieces = std::make_unique_for_overwrite<char[]>(elsewhere * width);
  comparison.conclude(pieces.get(), elsewhere * width, [&](void* at) {
    char* next = static_cast<char*>(at);
    for (int step = 1; step < layout.hosts(); ++step) {
      const size_t bytes = count_on(layout, layout.after(step), counts) * width;
      if (bytes > 0) std::memcpy(next, comparison.payload(layout.after(step)), bytes);
      next += bytes;
    }
  });
  const char* next = pieces.get();
  for (int step = 1; step < layout.hosts(); ++step) {
    for (int member : layout.members(layout.after(step))) {
      const size_t bytes = counts[member] * width;
      if (bytes > 0) std::memcpy(outs[member], next, bytes);
      next += bytes;
    }
  }
}

void carry_all_gather(Levels& on, const Calling& calling, const void* in, void* const* outs, const size_t* counts) {
  const Layout& layout = on.layout;
  const size_t width = size_of(calling.signature.dtype);
  Agreement::Comparison comparison(on.agreement, calling.signature, calling.call);
  comparison.meet();
  share_here(on, calling, in, outs, counts);
  std::byte* next = comparison.first() ? comparison.payload_for(layout.host()) : nullptr;
  for (int member : layout.here()) {
    const size_t bytes = counts[member] * width;
    if (next != nullptr && bytes > 0) std::memcpy(next, outs[member], bytes);
    if (next != nullptr) next += bytes;
  }
  comparison.post_to_all(count_on(layout, layout.host(), counts) * width);
  conclude_with_payloads(on, calling, comparison, outs, counts);
}

class LargeAllGather {
 public:
  LargeAllGather(Levels& on, const Calling& calling, const void* in, void* const* outs, const size_t* counts)
      : on_(on),
        calling_(calling),
        width_(size_of(calling.signature.dtype)),
        in_(static_cast<const char*>(in)),
        outs_(outs),
        counts_(counts),
        me_(on.layout.here()[static_cast<size_t>(on.layout.place())]),
        parts_(Parts::of(*std::max_element(counts, counts + on.layout.size()) * width_, kMostOfPart, kFewestParts,
                         on.layout.hosts() > 2 ? kLeastInRing : kLeastOfPart)),
        ring_(on.layout.hosts() > 2 && parts_.bytes >= kLeastInRing),
        comparison_(on.agreement, calling.signature, calling.call,
                    all_give(counts, on.layout.size()) ? on.round() : Route()),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    const auto arrivals = in_order_of_arrival();
    for (const auto& [index, host] : arrivals) expect(index, host);
    comparison_.meet();
    comparison_.post();
    for (size_t i = 0; i < parts_.count(); ++i) send(i);
    share_here(on_, calling_, in_, outs_, counts_);
    comparison_.conclude();
    size_t arrived = 0;
    for (const auto& [index, host] : arrivals) share(index, host, arrived);
    crossing_.await_all_sent();
  }

 private:
  using Arrival = std::pair<size_t, int>;  // a part of a host's pieces

  std::vector<Arrival> in_order_of_arrival() const {
    std::vector<Arrival> found;
    const int hosts = on_.layout.hosts();
    if (ring_) {
      for (int step = 1; step < hosts; ++step) {
        for (size_t i = 0; i < parts_.count(); ++i) found.emplace_back(i, on_.layout.after(hosts - step));
      }
    } else {
      for (size_t i = 0; i < parts_.count(); ++i) {
        for (int step = 1; step < hosts; ++step) found.emplace_back(i, on_.layout.after(step));
      }
    }
    return found;
  }

  // The bytes of this member's piece that belong to a part.
  Part part_of_piece(size_t index, int member) const {
    const size_t bytes = counts_[member] * width_, offset = std::min(bytes, index * parts_.each);
    return {offset, std::min(parts_.each, bytes - offset)};
  }

  void expect(size_t index, int host) {
    const int before = on_.layout.after(on_.layout.hosts() - 1);
    for (int member : on_.layout.members(host)) {
      if (on_.layout.partner(on_.layout.host(), member) != me_) continue;
      const auto [offset, bytes] = part_of_piece(index, member);
      const int source = ring_ ? on_.layout.partner(before, member) : member;
      receives_.push_back(crossing_.receive(static_cast<char*>(outs_[member]) + offset, bytes, source));
    }
  }

  void send(size_t index) {
    const auto [offset, bytes] = part_of_piece(index, me_);
    for (int step = 1; step < (ring_ ? 2 : on_.layout.hosts()); ++step) {
      crossing_.send(in_ + offset, bytes, on_.layout.partner(on_.layout.after(step), me_));
    }
  }

  // Shares one part of all pieces of another host, as many at a time as members of this host have received one.
  void share(size_t index, int host, size_t& arrived) {
    const auto& members = on_.layout.members(host);
    const size_t here = on_.layout.here().size();
    for (size_t row = 0; row < members.size(); row += here) {
      std::vector<void*> outs;
      std::vector<size_t> counts;
      for (size_t place = 0; place < here; ++place) {
        const int member = row + place < members.size() ? members[row + place] : -1;
        const auto [offset, bytes] = member < 0 ? Part{0, 0} : part_of_piece(index, member);
        outs.push_back(member < 0 ? nullptr : static_cast<char*>(outs_[member]) + offset);
        counts.push_back(bytes / width_);
      }
      const auto place = static_cast<size_t>(on_.layout.place());
      if (row + place < members.size()) {
        crossing_.await_received(receives_[arrived++]);
        if (ring_ && on_.layout.after(1) != host) {
          crossing_.send(outs[place], counts[place] * width_, on_.layout.partner(on_.layout.after(1), members[row + place]));
        }
      }
      on_.local.all_gather(outs[place], outs.data(), counts.data(), calling_.signature.dtype, calling_.call);
    }
  }

  Levels& on_;
  const Calling& calling_;
  const size_t width_;
  const char* const in_;
  void* const* const outs_;
  const size_t* const counts_;
  const int me_;
  const Parts parts_;  // of the largest piece; smaller ones have less in their last parts
  const bool ring_;
  std::vector<size_t> receives_;
  Agreement::Comparison comparison_;
  Crossing crossing_;
};

size_t most_of_a_host(const Layout& layout, const size_t* counts) {
  size_t most = 0;
  for (int host = 0; host < layout.hosts(); ++host) most = std::max(most, count_on(layout, host, counts));
  return most;
}

}  // namespace

void all_gather(Levels& on, const Calling& calling, const void* in, void* const* outs, const size_t* counts) {
  if (on.carries_pieces(most_of_a_host(on.layout, counts) * size_of(calling.signature.dtype))) {
    carry_all_gather(on, calling, in, outs, counts);
  } else {
    LargeAllGather(on, calling, in, outs, counts).run();
  }
}

}  // namespace opensmd::levels
