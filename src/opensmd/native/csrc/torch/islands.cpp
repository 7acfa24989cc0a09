#include "torch/islands.hpp"

#include <algorithm>
#include <deque>
#include <future>
#include <utility>

#include "core/kernels.hpp"

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

void Islands::all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor, const Call& call) {
  try {
    run(static_cast<char*>(data), count, dtype, reduction, factor, call);
  } catch (const std::exception& error) {
    if (!island_->aborted()) island_->abort(error.what());
    std::lock_guard lock(closing_);
    peers_.clear();  // which closes its connections: members of other hosts may be waiting there
    throw;
  }
}

void Islands::run(char* data, size_t count, DType dtype, Reduction reduction, double factor, const Call& call) {
  const size_t width = size_of(dtype);
  const int me = island_->rank();
  const Reduction here = reduction == Reduction::Average ? Reduction::Sum : reduction;
  const Reduction between = reduction == Reduction::PremulSum ? Reduction::Sum : reduction;
  auto gather = [&](const Slices& part) {
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
    if (under_way.size() == kLanes) finish_first();
    auto done = std::async(launch, [&, next, lane] { cross(next, lane, dtype, between, call); });
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
