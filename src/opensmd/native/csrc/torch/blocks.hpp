// Blocks of shared memory for large messages, of which only the place travels. The sender copies a message once, into a
// block of its heap. The receiver uses the block in place, as the memory of the tensor it receives. When that tensor is
// gone, a word in the block says so, and the sender can reuse the block. Through a ring, both sides would have to work
// at the same time.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "core/group.hpp"

namespace opensmd {

constexpr size_t kBlockBytes = 256 << 10;  // smaller messages fit into the ring

// Where a message lies, as told to its receiver: the block's offset in the sender's heap (-1: no block, the data
// follows), and the message's bytes.
using Place = std::array<int64_t, 2>;

// One member's blocks. One thread at a time.
class Blocks {
 public:
  explicit Blocks(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  // Blocks still in use by receivers stay theirs.
  ~Blocks();
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  // Copies a contiguous tensor into a block; nothing when the heap is full.
  std::optional<Place> put(const at::Tensor& data);

 private:
  struct Block {
    std::byte* start;
    size_t room;
  };

  const Block* take(size_t bytes);

  const std::shared_ptr<Group> group_;
  std::vector<Block> blocks_;
  bool full_ = false;
};

// The `count` elements that `member` has put into its block at `place`; the block is free again once they are
// destroyed.
at::Tensor borrowed(const std::shared_ptr<Group>& group, int member, const Place& place, int64_t count,
                at::ScalarType dtype);

}  // namespace opensmd
