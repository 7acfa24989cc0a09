// Blocks of shared memory that large messages lie in, so that only their places travel. The sender copies a message
// once, into a block of its heap. The receiver uses the block as it is, as the memory of the tensor that it receives.
// When that tensor is gone, a word in the block says so, and the sender fills the block again. Through a ring both
// sides would have to work at the same time.
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

// Where a message lies, as its receiver is told: the block's offset in the sender's heap (-1: it is not in a block but
// follows), and the message's bytes.
using Place = std::array<int64_t, 2>;

// One member's blocks. For one thread at a time.
class Blocks {
 public:
  explicit Blocks(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  // Those that receivers still use stay theirs.
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

// The `count` elements that `member` has put into its block at `place`; the block is free again when they are gone.
at::Tensor borrowed(const std::shared_ptr<Group>& group, int member, const Place& place, int64_t count,
                at::ScalarType dtype);

}  // namespace opensmd
