#include "core/memory/arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace opensmd {

namespace {
// A first-level cache tells lines at the same place in their pages apart by the lowest 28 bits of their addresses (AMD
// Zen): of two that differ only above those, it keeps one. The same tensor lies at the same place in several members'
// heaps, so heaps begin one page apart in those bits: the sum of two tensors in place takes 11 instead of 33 us per
// MiB.
constexpr size_t kTellingBytes = size_t{1} << 28;
}  // namespace

ArenaLayout::ArenaLayout(const ArenaShape& given) : shape(given) {
  const size_t n = static_cast<size_t>(shape.size);
  members = sizeof(ArenaHeader);
  records = members + n * sizeof(Member);
  stages = records + n * 2 * kRecordLength * sizeof(RecordLine);
  stage_bytes = kNotesBytes + kPlacedAtOnce * shape.staging_bytes + kLargestSlots * shape.chunk_bytes;
  ring_lines = stages + n * stage_bytes;
  rings = round_up(ring_lines + n * n * 2 * sizeof(RingLine), kPage);
  long_rings = rings + n * n * shape.ring_bytes;
  heaps = long_rings + n * n * shape.long_ring_bytes;
  if (shape.heap_bytes > 0) {
    heap_distance = round_up(shape.heap_bytes, std::min(shape.heap_bytes, kTellingBytes)) + kPage;
  }
  total = heaps + n * heap_distance;
}

namespace {

[[noreturn]] void fail(const std::string& what, int error) {
  throw CollectiveError(what + ": " + std::strerror(error));
}

ArenaShape read_shape(int fd) {
  ArenaHeader* header = static_cast<ArenaHeader*>(mmap(nullptr, kPage, PROT_READ, MAP_SHARED, fd, 0));
  if (header == MAP_FAILED) fail("cannot map the header of the group's shared memory", errno);
  ArenaShape shape;
  shape.size = static_cast<int>(header->size);
  shape.heap_bytes = header->heap_bytes;
  shape.staging_bytes = header->staging_bytes;
  shape.chunk_bytes = header->chunk_bytes;
  shape.zero_copy_bytes = header->zero_copy_bytes;
  shape.ring_bytes = header->ring_bytes;
  shape.long_ring_bytes = header->long_ring_bytes;
  const bool valid = header->magic == kArenaMagic;
  munmap(header, kPage);
  if (!valid) throw CollectiveError("the file given to the group is not the shared memory of an OpenSMD group");
  return shape;
}

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) fail("cannot duplicate the descriptor of the group's shared memory", errno);
  return copy;
}

}  // namespace

Arena::Arena(const ArenaShape& shape, int fd, int rank, bool owns_mapping)
    : rank_(rank), layout_(shape), owns_mapping_(owns_mapping), fd_(duplicate(fd)) {}

Arena::Arena(int fd, int rank, void* shared_mapping) : Arena(read_shape(fd), fd, rank, shared_mapping == nullptr) {
  if (shared_mapping != nullptr) {
    base_ = static_cast<std::byte*>(shared_mapping);
  } else {
    void* base = mmap(nullptr, layout_.total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    if (base == MAP_FAILED) {
      const int error = errno;
      fail("cannot map " + std::to_string(layout_.total >> 20) +
               " MiB of address space for the group's shared memory (a limit such as ulimit -v? a smaller heap needs less)",
           error);
    }
    base_ = static_cast<std::byte*>(base);
    // A crashed rank's core dump should not contain gigabytes of gradients.
    madvise(base_ + layout_.stages, layout_.total - layout_.stages, MADV_DONTDUMP);
  }
  reserve(&member(rank_), sizeof(Member));
  reserve(record(rank_, 0), 2 * kRecordLength * sizeof(RecordLine));
  // This row of counters, one page for 16 members, is the most that an idle mailbox touches.
  reserve(&ring_line(rank_, 0, RingKind::Short), static_cast<size_t>(shape().size) * 2 * sizeof(RingLine));
}

Arena::~Arena() {
  if (owns_mapping_ && base_ != nullptr) munmap(base_, layout_.total);
  close(fd_);
}

void Arena::reserve(const void* start, size_t bytes) const {
  if (bytes == 0) return;
  const off_t offset = static_cast<const std::byte*>(start) - base_;
  while (fallocate(fd_, 0, offset, static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS) return;
    fail("cannot reserve " + std::to_string((bytes + 1023) >> 10) +
             " KiB of shared memory (is /dev/shm or the memory of this container full?)",
         errno);
  }
}

void Arena::release(const void* start, size_t bytes) const {
  const off_t offset = static_cast<const std::byte*>(start) - base_;
  // If holes cannot be punched, the pages simply stay.
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
}

void Arena::reserve_ring(int to, RingKind kind) {
  const uint64_t bit = uint64_t{1} << to;
  uint64_t& reserved = rings_reserved_[static_cast<size_t>(kind)];
  if (reserved & bit) return;
  reserve(ring(rank_, to, kind), ring_bytes(kind));
  reserved |= bit;
}

}  // namespace opensmd
