// The arena: one sparse file that every member of a group maps, laid out like this:
//
//   header        shape, token, the abort word and the first cause
//   members       one block each: identity, flags (a cache line each), entry lines, sizes      <- idle groups touch
//   records       two flight records each: collectives and messages                           <- only down to here
//   stages        one each (see stage.hpp)                                 one-shot collectives and pipelines
//   ring lines    two counters per ring                                    mailbox
//   rings         a short and a long one per ordered pair                  mailbox
//   heaps         one each                                                 zero-copy tensors
//
// Every byte of a member's block, slots and outgoing rings is written only by that member; peers also write to heaps
// during a zero-copy collective. Pages are reserved with fallocate before the first write, because writing to a full
// tmpfs would raise SIGBUS rather than return an error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.hpp"
#include "core/memory/arena_file.hpp"
#include "core/protocol/configuration.hpp"

namespace opensmd {

constexpr int kMaxMembers = 64;
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kPlacedAtOnce = 4;  // largest pieces of data that a stage can hold for one-shot collectives
constexpr size_t kLargestSlots = 4;  // and slots of the largest size for streams
constexpr size_t kInlineBytes = 56;
constexpr size_t kNotesBytes = 2 * kPage;
constexpr size_t kRecordLength = 128;
constexpr size_t kTextBytes = 64;

inline size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// A counter that one member writes and that only grows; it wraps around.
struct alignas(kLine) Flag {
  std::atomic<uint32_t> value;
};

inline bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

// A member's announcement when it enters a collective. The sequence number is stored last.
struct alignas(kLine) Entry {
  std::atomic<uint32_t> sequence;
  uint32_t signature;
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Entry) == kLine);

enum class Presence : uint32_t { Absent, Joined, Left };

struct alignas(kLine) Identity {
  std::atomic<Presence> presence;
  int32_t pid;
  uint64_t start_time;     // of the process, in clock ticks since boot: tells a reused pid
  uint64_t start_stack;    // where the process's stack began, which exec changes
  uint64_t pid_namespace;  // pids mean nothing across namespaces
};

// Any member rings it; the owner sleeps on it while it waits for messages or for room.
struct alignas(kLine) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;
};

struct alignas(kLine) Progress {
  std::atomic<uint64_t> entered;
  std::atomic<uint64_t> completed;
  std::atomic<uint64_t> messages;  // length of the message record
};

// The collective in which the member's only thread waits, so that it will do nothing else; 0: none, or not known.
struct alignas(kLine) Blocked {
  std::atomic<uint64_t> in;
};

// For a member that also receives from outside the group: a sender counts its message before it checks whether it may
// come here.
struct alignas(kLine) Inbox {
  std::atomic<uint64_t> posted;
  std::atomic<uint32_t> closed;
};

struct alignas(kLine) Sizes {
  uint64_t given[kMaxMembers];     // bytes to each member, and
  uint64_t expected[kMaxMembers];  // from each, for all_to_all
  double factor;                   // for premul_sum
};

struct alignas(kPage) Member {
  Identity identity;
  Flag sleepers;  // how many peers sleep on one of this member's flags (the only counter that others write)
  Progress progress;
  Entry entries[2];  // by parity of the sequence number
  Flag published;    // pipeline steps whose chunk is readable
  Flag reduced;      // two-shot: steps in which this member's part is reduced
  Flag consumed;     // steps whose chunks this member no longer reads
  Flag finished;     // zero-copy collectives after which this member no longer touches its peers' tensors
  Doorbell doorbell;
  Blocked blocked;
  Inbox inbox;
  Sizes sizes[2];  // by parity
};

// Plain words as relaxed atomics: peers read them for reports while the owner keeps writing.
struct alignas(kLine) RecordLine {
  std::atomic<uint64_t> sequence, kind, tag, count, bytes, start_ns, end_ns, reserved;
  std::atomic<uint64_t> text[kTextBytes / 8];
};
static_assert(sizeof(RecordLine) == 128);

// For one ring. Both counters count bytes since the beginning.
struct alignas(kLine) RingLine {
  alignas(kLine) std::atomic<uint64_t> written;
  alignas(kLine) std::atomic<uint64_t> read;
};

// Messages go through their pair's short ring; payloads much larger than the caches go through the long one.
enum class RingKind { Short, Long };

static_assert(sizeof(Member) == kPage);

struct alignas(kPage) ArenaHeader {
  uint64_t magic;
  uint64_t token;
  uint64_t total_bytes;
  uint64_t size, heap_bytes, staging_bytes, chunk_bytes, zero_copy_bytes, ring_bytes, long_ring_bytes;
  alignas(kLine) std::atomic<uint32_t> abort_state;  // 0 fine, 1 being written, 2 written
  std::atomic<uint32_t> abort_kind;
  char abort_text[3500];
};

static_assert(sizeof(ArenaHeader) == kPage);

// Where everything lies, computed from the shape alone.
struct ArenaLayout {
  explicit ArenaLayout(const ArenaShape& shape);
  ArenaShape shape;
  size_t members, records, stages, stage_bytes, ring_lines, rings, long_rings, heaps, total;
  size_t heap_distance = 0;  // from one member's heap to the next one's
};

constexpr uint64_t kArenaMagic = 0x31646d736e65706fu;

// The mapping of an arena in this process.
class Arena {
 public:
  Arena(int fd, int rank, void* shared_mapping);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const ArenaShape& shape() const { return layout_.shape; }
  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  Member& member(int i) const { return reinterpret_cast<Member*>(base_ + layout_.members)[i]; }
  RecordLine* record(int i, int which) const {
    return reinterpret_cast<RecordLine*>(base_ + layout_.records) +
           (static_cast<size_t>(i) * 2 + static_cast<size_t>(which)) * kRecordLength;
  }
  std::byte* stage(int i) const { return base_ + layout_.stages + static_cast<size_t>(i) * layout_.stage_bytes; }
  size_t places_bytes() const { return kPlacedAtOnce * shape().staging_bytes; }
  size_t streams_offset() const { return kNotesBytes + places_bytes(); }  // in a stage
  size_t streams_bytes() const { return kLargestSlots * shape().chunk_bytes; }
  RingLine& ring_line(int from, int to, RingKind kind) const {
    return reinterpret_cast<RingLine*>(base_ + layout_.ring_lines)[pair(from, to) * 2 + static_cast<size_t>(kind)];
  }
  std::byte* ring(int from, int to, RingKind kind) const {
    return base_ + (kind == RingKind::Short ? layout_.rings : layout_.long_rings) + pair(from, to) * ring_bytes(kind);
  }
  size_t ring_bytes(RingKind kind) const {
    return kind == RingKind::Short ? shape().ring_bytes : shape().long_ring_bytes;
  }
  std::byte* heap(int i) const { return base_ + layout_.heaps + static_cast<size_t>(i) * layout_.heap_distance; }

  // Reserves pages that this member will write for the first time; throws CollectiveError if none are left.
  void reserve(const void* start, size_t bytes) const;
  void release(const void* start, size_t bytes) const;  // returns pages; they read as zero afterwards
  void reserve_ring(int to, RingKind kind);

 private:
  // Without a mapping. The other constructor delegates to this one, so that the destructor cleans up if it fails.
  Arena(const ArenaShape& shape, int fd, int rank, bool owns_mapping);

  size_t pair(int from, int to) const { return static_cast<size_t>(from * shape().size + to); }

  int rank_;
  ArenaLayout layout_;
  std::byte* base_ = nullptr;
  bool owns_mapping_;
  int fd_;
  uint64_t rings_reserved_[2] = {0, 0};  // by kind
};

}  // namespace opensmd
