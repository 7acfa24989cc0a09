// This member's zero-copy heap: a first-fit allocator over its region of the arena. Its bookkeeping is private memory.
//
// The first write to a page of shared memory is expensive (256 MiB: 0.2 to 1 s), so freed blocks keep their pages for
// the next allocation, up to as much as is in use, or 64 MiB. DDP, for one, reallocates its buckets after the first
// iteration.
#pragma once

#include <map>
#include <mutex>

#include "core/memory/arena.hpp"

namespace opensmd {

class Heap {
 public:
  Heap(Arena& arena, int rank);

  void* allocate(size_t bytes);  // nullptr when the heap, or the memory behind it, is full
  void free(void* block);
  bool contains(const void* address, size_t bytes = 1) const {
    const std::byte* start = static_cast<const std::byte*>(address);
    return start >= base_ && start + bytes <= base_ + capacity_;
  }
  uint64_t offset_of(const void* address) const {
    return static_cast<uint64_t>(static_cast<const std::byte*>(address) - base_);
  }

 private:
  struct Hole {
    size_t bytes;
    bool backed;  // its pages are still there
  };
  using Holes = std::map<size_t, Hole>;  // by offset

  Holes::iterator find(size_t bytes);
  bool back(size_t offset, size_t bytes);
  void add_hole(size_t offset, Hole hole);
  void trim();

  Arena& arena_;
  std::byte* base_;
  size_t capacity_;
  std::mutex mutex_;
  Holes holes_;
  std::map<size_t, size_t> used_;  // offset to bytes
  size_t used_bytes_ = 0;
  size_t backed_bytes_ = 0;  // in holes
};

}  // namespace opensmd
