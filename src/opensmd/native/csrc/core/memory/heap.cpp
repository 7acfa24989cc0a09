#include "core/memory/heap.hpp"

#include <algorithm>

namespace opensmd {

namespace {
constexpr size_t kKeptAtLeast = size_t{64} << 20;
}

Heap::Heap(Arena& arena, int rank)
    : arena_(arena), base_(arena.heap(rank)), capacity_(arena.shape().heap_bytes) {
  if (capacity_ > 0) holes_[0] = Hole{capacity_, false};
}

// A backed hole that fits beats an untouched one: its pages already exist.
Heap::Holes::iterator Heap::find(size_t bytes) {
  auto untouched = holes_.end();
  for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
    if (hole->second.bytes < bytes) continue;
    if (hole->second.backed) return hole;
    if (untouched == holes_.end()) untouched = hole;
  }
  return untouched;
}

// On a machine short of memory the heap counts as full: callers go on with ordinary memory.
bool Heap::back(size_t offset, size_t bytes) {
  try {
    arena_.reserve(base_ + offset, bytes);
    return true;
  } catch (const CollectiveError&) {
    return false;
  }
}

void* Heap::allocate(size_t bytes) {
  bytes = round_up(std::max<size_t>(bytes, 1), kPage);
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = find(bytes);
  if (found == holes_.end()) return nullptr;
  const size_t offset = found->first;
  const Hole hole = found->second;
  if (!hole.backed && !back(offset, bytes)) return nullptr;
  holes_.erase(found);
  if (hole.bytes > bytes) holes_[offset + bytes] = Hole{hole.bytes - bytes, hole.backed};
  if (hole.backed) backed_bytes_ -= bytes;
  used_[offset] = bytes;
  used_bytes_ += bytes;
  return base_ + offset;
}

void Heap::free(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(contains(block) ? offset_of(block) : capacity_);
  if (used == used_.end()) throw std::invalid_argument("heap_free got an address that heap_allocate did not return");
  const Hole hole{used->second, true};
  const size_t offset = used->first;
  used_.erase(used);
  used_bytes_ -= hole.bytes;
  backed_bytes_ += hole.bytes;
  add_hole(offset, hole);
  trim();
}

// Neighbours merge only if both or neither have pages: a hole is backed entirely or not at all.
void Heap::add_hole(size_t offset, Hole hole) {
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && next->first == offset + hole.bytes && next->second.backed == hole.backed) {
    hole.bytes += next->second.bytes;
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second.bytes == offset && before->second.backed == hole.backed) {
      before->second.bytes += hole.bytes;
      return;
    }
  }
  holes_[offset] = hole;
}

void Heap::trim() {
  while (backed_bytes_ > std::max(used_bytes_, kKeptAtLeast)) {
    auto largest = holes_.end();
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (!hole->second.backed) continue;
      if (largest == holes_.end() || hole->second.bytes > largest->second.bytes) largest = hole;
    }
    const size_t offset = largest->first;
    const size_t bytes = largest->second.bytes;
    arena_.release(base_ + offset, bytes);
    backed_bytes_ -= bytes;
    holes_.erase(largest);
    add_hole(offset, Hole{bytes, false});
  }
}

}  // namespace opensmd
