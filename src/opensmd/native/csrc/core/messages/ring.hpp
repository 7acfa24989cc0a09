// One ordered pair's stream of bytes through shared memory: one writer, one reader, two counters that only grow.
//
//        read                 written
//          v                     v
//   ...|header|payload...|header|pay|........ room ........|     positions modulo the ring's size
//
// A message is a 32-byte header and its payload, padded to whole cache lines, so a small message is one line. Large
// messages are published piece by piece: the reader copies one piece while the writer copies the next.
//
// Payloads much larger than the caches go through a separate ring, only their headers through the common one. It is
// longer, so that a line has left the reader's cache before it is rewritten (4.6 ns per line in 1 MiB, 1.6 in 2 MiB
// without memory in the way). The common ring is shorter, because memory untouched for long is in no cache at all.
#pragma once

#include <algorithm>

#include "core/memory/arena.hpp"
#include "core/memory/copy.hpp"

namespace opensmd {

struct MessageHeader {
  uint64_t bytes;
  int64_t tag;
  uint64_t number;  // of this pair's messages, for self-checks
  uint64_t dtype;  // a DType
};

inline bool takes_long_ring(size_t bytes) { return bytes >= kPastCacheBytes; }

// Small enough that reader and writer overlap, large enough that counters cost nothing.
inline size_t piece_bytes(size_t message_bytes) {
  return takes_long_ring(message_bytes) ? size_t{128} << 10 : size_t{32} << 10;
}

// Counters are stored and read in one order with the counts of sleepers (Mailbox::ring_doorbell): otherwise a thread
// going to sleep and one waking it could miss each other.
class RingEnd {
 public:
  RingEnd(RingLine& line, std::byte* ring, size_t size) : line_(line), ring_(ring), size_(size) {}

 protected:
  template <class Copy>
  void split(uint64_t position, size_t bytes, const Copy& copy) {
    const size_t offset = position % size_;
    const size_t first = std::min(bytes, size_ - offset);
    copy(ring_ + offset, size_t{0}, first);
    if (first < bytes) copy(ring_, first, bytes - first);
  }

  RingLine& line_;
  std::byte* ring_;
  size_t size_;
};

class RingWriter : public RingEnd {
 public:
  RingWriter(RingLine& line, std::byte* ring, size_t size) : RingEnd(line, ring, size), written_(line.written.load()) {}

  size_t room() const {
    // The padding behind a message may reach beyond a ring that is full to the last byte.
    const size_t used = static_cast<size_t>(written_ - line_.read.load(std::memory_order_seq_cst));
    return used < size_ ? size_ - used : 0;
  }

  void put(const void* data, size_t bytes, Copy copy = copy_bytes) {
    split(written_, bytes, [data, copy](std::byte* to, size_t offset, size_t count) {
      copy(to, static_cast<const std::byte*>(data) + offset, count);
    });
    written_ += bytes;
  }
  void pad() { written_ = round_up(written_, kLine); }
  void publish() { line_.written.store(written_, std::memory_order_seq_cst); }

 private:
  uint64_t written_;
};

class RingReader : public RingEnd {
 public:
  RingReader(RingLine& line, std::byte* ring, size_t size) : RingEnd(line, ring, size), read_(line.read.load()) {}

  size_t available() const {
    const uint64_t written = line_.written.load(std::memory_order_seq_cst);
    return written > read_ ? static_cast<size_t>(written - read_) : 0;
  }

  void peek(void* data, size_t bytes, Copy copy = copy_bytes) {
    split(read_, bytes, [data, copy](const std::byte* from, size_t offset, size_t count) {
      copy(static_cast<std::byte*>(data) + offset, from, count);
    });
  }
  void skip(size_t bytes) { read_ += bytes; }
  void pad() { read_ = round_up(read_, kLine); }
  void release() { line_.read.store(read_, std::memory_order_seq_cst); }

 private:
  uint64_t read_;
};

}  // namespace opensmd
