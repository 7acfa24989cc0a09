#include "torch/blocks.hpp"

#include <ATen/ATen.h>
#include <unistd.h>

namespace opensmd {
namespace {

constexpr size_t kHeaderBytes = 64;  // its first word says whether the block is in use

std::atomic<int64_t>& in_use(std::byte* block) { return *reinterpret_cast<std::atomic<int64_t>*>(block); }

}  // namespace

Blocks::~Blocks() {
  for (const Block& block : blocks_) {
    if (in_use(block.start).load(std::memory_order_acquire) == 0) group_->heap_free(block.start);
  }
}

std::optional<Place> Blocks::put(const at::Tensor& data) {
  const Block* block = take(data.nbytes());
  if (block == nullptr) return std::nullopt;
  in_use(block->start).store(1, std::memory_order_relaxed);
  at::from_blob(block->start + kHeaderBytes, data.sizes(), data.options()).copy_(data);
  return Place{static_cast<int64_t>(group_->heap_offset(block->start)), static_cast<int64_t>(data.nbytes())};
}

const Blocks::Block* Blocks::take(size_t bytes) {
  for (const Block& block : blocks_) {
    const bool fits = bytes <= block.room && block.room <= 2 * bytes;
    if (fits && in_use(block.start).load(std::memory_order_acquire) == 0) return &block;
  }
  if (full_) return nullptr;
  void* start = group_->heap_allocate(kHeaderBytes + bytes);
  full_ = start == nullptr;
  if (full_) return nullptr;
  blocks_.push_back({static_cast<std::byte*>(start), bytes});
  return &blocks_.back();
}

at::Tensor borrowed(const std::shared_ptr<Group>& group, int member, const Place& place, int64_t count,
                at::ScalarType dtype) {
  const size_t bytes = kHeaderBytes + static_cast<size_t>(place[1]);
  auto* start = static_cast<std::byte*>(group->heap_address(member, static_cast<uint64_t>(place[0]), bytes));
  // A forked child may also destroy its copy of a tensor; the block is the parent's.
  auto give_back = [group, start, owner = getpid()](void*) {
    if (getpid() == owner) in_use(start).store(0, std::memory_order_release);
  };
  return at::from_blob(start + kHeaderBytes, {count}, std::move(give_back), at::TensorOptions(dtype));
}

}  // namespace opensmd
