#include "torch/memory/kept_blocks.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

namespace opensmd {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHeadroom = 16;  // the peak usage is divided by this

void* map_pages(size_t bytes) {
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return start == MAP_FAILED ? nullptr : start;
}

}  // namespace

size_t KeptBlocks::most() const { return std::max(most_, most_before_); }

size_t KeptBlocks::limit() const { return most() + most() / kHeadroom; }

void* KeptBlocks::take(size_t bytes) {
  const size_t rounded = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::lock_guard lock(mutex_);
  if (void* same = reuse(rounded)) return use(same, rounded);
  const size_t most_until_now = most_;
  most_ = std::max(most_, in_use_ + rounded);
  if (in_use_ + kept_bytes_ + rounded > limit()) {
    if (void* part = cut(rounded)) return use(part, rounded);
    const size_t others = in_use_ + rounded;
    unmap_down_to(limit() > others ? limit() - others : 0);
  }
  void* fresh = map_pages(rounded);
  if (fresh == nullptr) {
    unmap_down_to(0);
    fresh = map_pages(rounded);
  }
  if (fresh == nullptr) {
    most_ = most_until_now;
    return nullptr;
  }
  return use(fresh, rounded);
}

bool KeptBlocks::give_back(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(block);
  if (found == used_.end()) return false;
  const Kept freed{found->first, found->second};
  used_.erase(found);
  in_use_ -= freed.bytes;
  keep(freed, kept_.end());
  return true;
}

void KeptBlocks::end_step() {
  const std::lock_guard lock(mutex_);
  most_before_ = most_;
  most_ = in_use_;
  unmap_down_to(limit() - in_use_);
}

KeptBlocks::Bytes KeptBlocks::bytes() {
  const std::lock_guard lock(mutex_);
  return {in_use_, kept_bytes_, most()};
}

void* KeptBlocks::use(void* start, size_t bytes) {
  used_.emplace(start, bytes);
  in_use_ += bytes;
  most_ = std::max(most_, in_use_);
  return start;
}

// The most recently freed block of this size: it may still be in the caches.
void* KeptBlocks::reuse(size_t bytes) {
  const auto after = by_size_.upper_bound(bytes);
  if (after == by_size_.begin() || std::prev(after)->first != bytes) return nullptr;
  void* start = std::prev(after)->second->start;
  forget(std::prev(after));
  return start;
}

// Part of the smallest block that is larger. The rest keeps its age.
void* KeptBlocks::cut(size_t bytes) {
  const auto larger = by_size_.upper_bound(bytes);
  if (larger == by_size_.end()) return nullptr;
  const Kept block = *larger->second;
  const auto next = std::next(larger->second);
  forget(larger);
  keep({static_cast<std::byte*>(block.start) + bytes, block.bytes - bytes}, next);
  return block.start;
}

void KeptBlocks::keep(Kept block, Age::iterator before) {
  by_size_.emplace(block.bytes, kept_.insert(before, block));
  kept_bytes_ += block.bytes;
}

void KeptBlocks::forget(std::multimap<size_t, Age::iterator>::iterator found) {
  kept_bytes_ -= found->first;
  kept_.erase(found->second);
  by_size_.erase(found);
}

void KeptBlocks::unmap_down_to(size_t bytes) {
  while (kept_bytes_ > bytes) {
    const Age::iterator oldest = kept_.begin();
    if (munmap(oldest->start, oldest->bytes) != 0) return;  // the kernel's list of mappings is full
    auto found = by_size_.lower_bound(oldest->bytes);
    while (found->second != oldest) ++found;
    forget(found);
  }
}

}  // namespace opensmd
