#include "torch/hosts/islands.hpp"

#include <algorithm>
#include <deque>
#include <future>
#include <tuple>
#include <utility>

#include "core/kernels/kernels.hpp"

namespace opensmd {
namespace {

// While one part travels between the hosts, the next is reduced and the last gathered in shared memory.
constexpr size_t kPartBytes = 2u << 20;
// Less is not worth several connections at once.
constexpr size_t kSplitBytes = 32u << 10;

}  // namespace

Islands::Islands(std::shared_ptr<Group> island, std::vector<std::unique_ptr<Transport>> peers, int crossing,
                 int members)
    : island_(std::move(island)), peers_(std::move(peers)), crossing_(crossing), members_(members) {}

bool Islands::serves(DType dtype, Reduction reduction) {
  if (!reducible(dtype, reduction)) return false;
  const bool wide = dtype == DType::F32 || dtype == DType::F64 || dtype == DType::C64 || dtype == DType::C128;
  switch (reduction) {
    case Reduction::Average: return wide;  // of whole numbers, sums have 64 bits
    case Reduction::Sum:
    case Reduction::Product:
    case Reduction::PremulSum: return wide || reducible(dtype, Reduction::BitAnd);
    default: return true;
  }
}

void Islands::all_reduce(Agreement& agreement, const Signature& signature, void* data, double factor,
                         const Call& call) {
  if (agreement.carries(signature.count * size_of(signature.dtype))) {
    sum_with_comparison(agreement, signature, data, factor, call);
  } else {
    sum_in_parts(agreement, signature, static_cast<char*>(data), factor, call);
  }
}

// Of few bytes: first members send their hosts' sums with what they send anyway, and all hosts add them up alike.
void Islands::sum_with_comparison(Agreement& agreement, const Signature& signature, void* data, double factor,
                                  const Call& call) {
  const auto [dtype, reduction, count] = std::tuple(signature.dtype, signature.reduction, signature.count);
  const bool average = reduction == Reduction::Average, first = island_->rank() == 0;
  const bool premultiplied = reduction == Reduction::PremulSum;
  Agreement::Comparison comparison(agreement, signature, call);
  std::vector<char> sums(first ? count * size_of(dtype) : 0);
  if (comparison.agreed_here()) {
    island_->reduce(data, first ? sums.data() : nullptr, count, dtype, average ? Reduction::Sum : reduction, 0, factor,
                    call);
    comparison.post(sums.data(), sums.size());
  } else {
    comparison.post();
  }
  comparison.conclude();
  if (first && !sums.empty()) {
    std::vector<const void*> hosts;
    for (int host = 0; host < comparison.hosts(); ++host) hosts.push_back(comparison.payload(host));
    const Reducer reducer(dtype, average || premultiplied ? Reduction::Sum : reduction, comparison.hosts());
    reducer(&data, 1, hosts.data(), comparison.hosts(), sums.size());
    if (average) average_sums(data, count, dtype, members_);
  }
  island_->broadcast(data, count, dtype, 0, call);
}

void Islands::sum_in_parts(Agreement& agreement, const Signature& signature, char* data, double factor,
                           const Call& call) {
  const auto [dtype, reduction, count] = std::tuple(signature.dtype, signature.reduction, signature.count);
  const size_t width = size_of(dtype);
  const int me = island_->rank();
  const Reduction here = reduction == Reduction::Average ? Reduction::Sum : reduction;
  const Reduction between = reduction == Reduction::PremulSum ? Reduction::Sum : reduction;
  Agreement::Comparison comparison(agreement, signature, call);
  comparison.post();
  if (!comparison.agreed_here()) comparison.conclude();
  auto gather = [&, dtype = dtype](const Slices& part) {
    island_->all_gather(part.data[me], part.outputs(), part.counts.data(), dtype, call);
  };
  struct Crossing {
    Slices part;
    std::future<void> done;
  };
  std::deque<Crossing> under_way;
  // A single part needs no thread of its own.
  const auto launch = count * width <= kPartBytes ? std::launch::deferred : std::launch::async;
  auto finish_first = [&] {
    under_way.front().done.get();
    gather(under_way.front().part);
    under_way.pop_front();
  };
  size_t lane = 0;
  for (size_t begin = 0; begin == 0 || begin < count; begin += kPartBytes / width) {
    const size_t length = std::min(count - begin, kPartBytes / width);
    const int takers = length * width < kSplitBytes ? 1 : crossing_;
    Slices next = cut(data + begin * width, length, dtype, takers, island_->size());
    island_->reduce_scatter(next.inputs(), next.counts.data(), next.data[me], dtype, here, factor, call);
    if (begin == 0) comparison.conclude();  // the other hosts' frames have travelled meanwhile
    if (under_way.size() == kLanes) finish_first();
    auto done = std::async(launch, [&, next, lane, dtype = dtype] { cross(next, lane, dtype, between, call); });
    under_way.push_back({std::move(next), std::move(done)});
    lane = (lane + 1) % kLanes;
  }
  while (!under_way.empty()) finish_first();
}

void Islands::cross(const Slices& part, size_t lane, DType dtype, Reduction reduction, const Call& call) {
  const int me = island_->rank();
  const size_t count = part.counts[me];
  if (count == 0) return;
  void* slice = part.data[me];
  const bool average = reduction == Reduction::Average;
  peers_[lane]->all_reduce(slice, count, dtype, average ? Reduction::Sum : reduction, 1.0, call);
  if (average) average_sums(slice, count, dtype, members_);
}

void Islands::abort(const std::string& reason) {
  island_->abort(reason);
  std::lock_guard lock(closing_);
  for (auto& lane : peers_) lane->abort(reason);
}

void Islands::leave() {
  island_->leave();
  std::lock_guard lock(closing_);
  for (auto& lane : peers_) lane->leave();
}

}  // namespace opensmd
