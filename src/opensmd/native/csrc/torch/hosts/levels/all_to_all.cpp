// Large: every member sends each member of another host its piece, and gives those of its own host theirs in shared
// memory.
//
// Among more than two hosts, large data goes in pieces, from each host to one other at a time, so that links are all busy
// until the end: otherwise some hosts get ahead, and many send to one.
//
// If all pieces have one size everywhere, the comparison says so. Otherwise members exchange their counts first.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "core/algorithms/counts.hpp"
#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"

namespace opensmd::levels {
namespace {

struct Exchange {
  const void* const* ins;
  const size_t* in_counts;
  void* const* outs;
  const size_t* out_counts;

  // The one count of all pieces that this member sends and receives, plus one; 0 if they differ.
  uint64_t one_count(int size) const {
    const size_t count = in_counts[0];
    const auto same = [count](size_t other) { return other == count; };
    const bool all = std::all_of(in_counts, in_counts + size, same) && std::all_of(out_counts, out_counts + size, same);
    return all ? count + 1 : 0;
  }
};

void exchange_here(Levels& on, const Calling& calling, const Exchange& data) {
  std::vector<const void*> ins;
  std::vector<void*> outs;
  std::vector<size_t> in_counts, out_counts;
  for (int member : on.layout.here()) {
    ins.push_back(data.ins[member]);
    outs.push_back(data.outs[member]);
    in_counts.push_back(data.in_counts[member]);
    out_counts.push_back(data.out_counts[member]);
  }
  on.local.all_to_all(ins.data(), in_counts.data(), outs.data(), out_counts.data(), calling.signature.dtype,
                      calling.call);
}

// Pieces of one size: those of this host's members for other hosts go to its first member, into the frames.
void give_to_first(Levels& on, const Calling& calling, Agreement::Comparison& comparison, const Exchange& data) {
  const Layout& layout = on.layout;
  const size_t count = data.in_counts[0], bytes = count * size_of(calling.signature.dtype);
  const size_t of_member = (static_cast<size_t>(layout.size()) - layout.here().size()) * bytes;
  auto given = std::make_unique_for_overwrite<char[]>(of_member);
  char* next = given.get();
  for (int step = 1; step < layout.hosts(); ++step) {
    for (int member : layout.members(layout.after(step))) {
      if (bytes > 0) std::memcpy(next, data.ins[member], bytes);
      next += bytes;
    }
  }
  auto all = std::make_unique_for_overwrite<char[]>(comparison.first() ? of_member * layout.here().size() : 0);
  std::vector<void*> pieces;
  for (size_t place = 0; comparison.first() && place < layout.here().size(); ++place) {
    pieces.push_back(all.get() + place * of_member);
  }
  on.local.gather(given.get(), comparison.first() ? pieces.data() : nullptr, of_member, DType::Byte, 0, calling.call);
  std::vector<size_t> sizes(static_cast<size_t>(layout.hosts()), 0);
  size_t offset = 0;
  for (int step = 1; comparison.first() && step < layout.hosts(); ++step) {
    const int host = layout.after(step);
    const size_t of_host = layout.members(host).size() * bytes;
    for (size_t place = 0; place < layout.here().size() && of_host > 0; ++place) {
      std::memcpy(comparison.payload_for(host) + place * of_host, all.get() + place * of_member + offset, of_host);
    }
    sizes[static_cast<size_t>(host)] = of_host * layout.here().size();
    offset += of_host;
  }
  comparison.post(sizes);
}

// The first member shares what has come from other hosts.
void conclude_with_arrived(Levels& on, const Calling& calling, Agreement::Comparison& comparison,
                           const Exchange& data) {
  const Layout& layout = on.layout;
  const size_t bytes = data.in_counts[0] * size_of(calling.signature.dtype), here = layout.here().size();
  const size_t total = (static_cast<size_t>(layout.size()) - here) * here * bytes;
  auto all = std::make_unique_for_overwrite<char[]>(total);
  comparison.conclude(all.get(), total, [&](void* at) {
    char* next = static_cast<char*>(at);
    for (int step = 1; step < layout.hosts() && comparison.same_detail(); ++step) {
      const size_t of_host = layout.members(layout.after(step)).size() * here * bytes;
      std::memcpy(next, comparison.payload(layout.after(step)), of_host);
      next += of_host;
    }
  });
  if (!comparison.same_detail()) return;
  const char* next = all.get() + static_cast<size_t>(layout.place()) * bytes;
  for (int step = 1; step < layout.hosts(); ++step) {
    for (int member : layout.members(layout.after(step))) {
      if (bytes > 0) std::memcpy(data.outs[member], next, bytes);
      next += here * bytes;
    }
  }
}

// Compares what is sent and what is expected for every pair; every member checks every pair, so that all raise.
void compare_counts(Levels& on, const Calling& calling, const Exchange& data) {
  const auto size = static_cast<size_t>(on.layout.size());
  std::vector<uint64_t> own(data.in_counts, data.in_counts + size);
  own.insert(own.end(), data.out_counts, data.out_counts + size);
  std::vector<std::vector<uint64_t>> all(size, std::vector<uint64_t>(own.size()));
  std::vector<void*> outs;
  for (auto& counts : all) outs.push_back(counts.data());
  const std::vector<size_t> lengths(size, own.size());
  Signature signature = calling.signature;
  signature.operation = Operation::AllGather;
  signature.dtype = DType::U64;
  signature.count = size * own.size();
  all_gather(on, {signature, calling.call}, own.data(), outs.data(), lengths.data());
  for (size_t from = 0; from < size; ++from) {
    for (size_t to = 0; to < size; ++to) {
      const uint64_t given = all[from][to], expected = all[to][size + from];
      if (given == expected) continue;
      throw Mismatch(c10::str(on.wire.name(static_cast<int>(from)), " sends ", given, " elements to ",
                              on.wire.name(static_cast<int>(to)), ", which expects ", expected,
                              "; input and output splits of each pair must agree"));
    }
  }
}

// Members of different hosts send each other their pieces in rounds; the next ones leave once earlier ones have come. In
// each round, a member sends a piece to one other and receives one. Where that is so little that waiting would take
// longer, it sends to all at once; these are two pieces at most, so nobody waits for it.
class Between {
 public:
  Between(Levels& on, const Calling& calling, const Exchange& data, uint64_t digest)
      : layout_(on.layout),
        data_(data),
        width_(size_of(calling.signature.dtype)),
        most_(on.piece),
        places_(layout_.most_on_a_host()),
        in_turn_(most_bytes() * static_cast<size_t>(places_) >= on.piece),
        pieces_(most_pieces()),
        receives_(pieces_ * static_cast<size_t>(in_turn_ ? places_ * (layout_.hosts() - 1) : 1)),
        crossing_(on.wire, calling.call, digest) {}

  // `first` runs before anything leaves, `meanwhile` while it is in transit. A piece whose two ends disagree about its
  // size goes nowhere, or into the memory meant for it.
  template <typename First, typename Meanwhile>
  void run(First first, Meanwhile meanwhile) {
    for (size_t i = 0; i < kAhead; ++i) expect(i);
    first();
    for (size_t i = 0; i < kOnTheirWay; ++i) give(i);
    meanwhile();
    for (size_t i = 0; i < receives_.size(); ++i) {
      for (size_t receive : receives_[i]) crossing_.await_received(receive);
      expect(i + kAhead);
      give(i + kOnTheirWay);
    }
    crossing_.await_all_sent();
  }

 private:
  static constexpr size_t kFewestPieces = 8, kOnTheirWay = 2;

  // Pieces of what one member sends another: the two know no other counts.
  Parts pieces(size_t count) const { return Parts::of(count * width_, most_, kFewestPieces, most_ / 2); }
  Part piece(size_t index, size_t count) const {
    const Parts all = pieces(count);
    return index < all.count() ? all.part(index) : Part{0, 0};
  }
  size_t most_bytes() const {
    const auto most = [this](const size_t* counts) { return *std::max_element(counts, counts + layout_.size()); };
    return std::max(most(data_.in_counts), most(data_.out_counts)) * width_;
  }
  size_t most_pieces() const {
    size_t most = 0;
    for (int member = 0; member < layout_.size(); ++member) {
      most = std::max({most, pieces(data_.in_counts[member]).count(), pieces(data_.out_counts[member]).count()});
    }
    return most;
  }

  const std::vector<int>& members(int step, bool sends) const {
    return layout_.members(layout_.after(sends ? step : layout_.hosts() - step));
  }

  // Whom this member sends something in a round, or from whom it receives.
  std::vector<int> others(size_t round, bool sends) const {
    std::vector<int> found;
    for (int step = 1; !in_turn_ && step < layout_.hosts(); ++step) {
      found.insert(found.end(), members(step, sends).begin(), members(step, sends).end());
    }
    if (!in_turn_) return found;
    const auto turn = static_cast<int>(round / pieces_), shift = turn % places_;
    const auto& there = members(1 + turn / places_, sends);
    const auto place = static_cast<size_t>((layout_.place() + (sends ? shift : places_ - shift)) % places_);
    if (place < there.size()) found.push_back(there[place]);
    return found;
  }

  void expect(size_t round) {
    if (round >= receives_.size()) return;
    for (int member : others(round, false)) {
      const auto [offset, bytes] = piece(round % pieces_, data_.out_counts[member]);
      receives_[round].push_back(crossing_.receive(static_cast<char*>(data_.outs[member]) + offset, bytes, member));
    }
  }

  void give(size_t round) {
    if (round >= receives_.size()) return;
    for (int member : others(round, true)) {
      const auto [offset, bytes] = piece(round % pieces_, data_.in_counts[member]);
      crossing_.send(static_cast<const char*>(data_.ins[member]) + offset, bytes, member);
    }
  }

  const Layout& layout_;
  const Exchange& data_;
  const size_t width_;
  const size_t most_;  // of a piece
  const int places_;     // on the largest host
  const bool in_turn_;
  const size_t pieces_;  // of the most that one member sends another
  std::vector<std::vector<size_t>> receives_;  // by round
  Crossing crossing_;
};

}  // namespace

void all_to_all(Levels& on, const Calling& calling, const void* const* ins, const size_t* in_counts,
                void* const* outs, const size_t* out_counts) {
  const Exchange data{ins, in_counts, outs, out_counts};
  const uint64_t detail = data.one_count(on.layout.size());
  const auto most = static_cast<size_t>(on.layout.most_on_a_host());
  const size_t piece = in_counts[0] * size_of(calling.signature.dtype);
  Agreement::Comparison comparison(on.agreement, calling.signature, calling.call, {}, detail);
  const uint64_t digest = comparison.digest();
  const bool small = detail != 0 && on.carries_pieces(piece * most * most);
  if (small) comparison.meet();
  if (small && comparison.same_detail()) {
    give_to_first(on, calling, comparison, data);
    conclude_with_arrived(on, calling, comparison, data);
    if (!comparison.same_detail()) {
      compare_counts(on, calling, data);
      Between(on, calling, data, digest).run([] {}, [] {});
    }
    return exchange_here(on, calling, data);
  }
  bool one_count = false;
  const auto first = [&] {
    if (!small) comparison.meet();
    one_count = detail != 0 && comparison.same_detail();
    comparison.post();
  };
  Between(on, calling, data, digest).run(first, [&] {
    if (one_count) exchange_here(on, calling, data);
    comparison.conclude();
    if (!one_count || !comparison.same_detail()) compare_counts(on, calling, data);
    if (!one_count) exchange_here(on, calling, data);
  });
}

}  // namespace opensmd::levels
