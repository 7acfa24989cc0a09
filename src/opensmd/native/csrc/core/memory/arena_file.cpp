// Creating, finding and naming an arena's file.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/memory/arena.hpp"

namespace opensmd {

namespace {

uint64_t random_token() {
  uint64_t token = 0;
  if (getrandom(&token, sizeof(token), 0) != static_cast<ssize_t>(sizeof(token))) {
    throw CollectiveError("the kernel gives no random numbers for the token of the group's shared memory");
  }
  return token;
}

ArenaShape checked(ArenaShape shape) {
  if (shape.size < 1 || shape.size > kMaxMembers) {
    throw std::invalid_argument("a shared-memory group has 1 to " + std::to_string(kMaxMembers) + " members, not " +
                                std::to_string(shape.size));
  }
  shape.chunk_bytes = round_up(std::max(shape.chunk_bytes, kMaxMembers * kLine), kPage);
  shape.staging_bytes = std::min(round_up(std::max<size_t>(shape.staging_bytes, kPage), kPage), shape.chunk_bytes);
  shape.ring_bytes = round_up(std::max<size_t>(shape.ring_bytes, kPage), kPage);
  shape.long_ring_bytes = round_up(std::max<size_t>(shape.long_ring_bytes, kPage), kPage);
  shape.heap_bytes = round_up(shape.heap_bytes, kPage);
  return shape;
}

int make_file(ArenaPlace place, uint64_t token, std::string& path) {
  char name[64];
  if (place == ArenaPlace::Memfd) {
    const int fd = static_cast<int>(memfd_create("opensmd", MFD_CLOEXEC));
    std::snprintf(name, sizeof(name), "/proc/%d/fd/%d", static_cast<int>(getpid()), fd);
    path = name;
    return fd;
  }
  std::snprintf(name, sizeof(name), "/dev/shm/opensmd-%016llx", static_cast<unsigned long long>(token));
  path = name;
  return open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

void write_header(int fd, const ArenaLayout& layout, uint64_t token) {
  // Reserved before it is written: on a full tmpfs pwrite then fails instead of killing the process.
  std::byte page[offsetof(ArenaHeader, abort_state)] = {};
  uint64_t fields[10] = {kArenaMagic,
                         token,
                         layout.total,
                         static_cast<uint64_t>(layout.shape.size),
                         layout.shape.heap_bytes,
                         layout.shape.staging_bytes,
                         layout.shape.chunk_bytes,
                         layout.shape.zero_copy_bytes,
                         layout.shape.ring_bytes,
                         layout.shape.long_ring_bytes};
  static_assert(offsetof(ArenaHeader, long_ring_bytes) == 9 * sizeof(uint64_t));
  std::memcpy(page, fields, sizeof(fields));
  const bool sized = ftruncate(fd, static_cast<off_t>(layout.total)) == 0;
  if (!sized || fallocate(fd, 0, 0, sizeof(ArenaHeader)) != 0 ||
      pwrite(fd, page, sizeof(page), 0) != static_cast<ssize_t>(sizeof(page))) {
    throw CollectiveError("cannot make the group's shared memory (" + std::to_string(layout.total >> 20) +
                          " MiB, sparse): " + std::strerror(errno));
  }
}

}  // namespace

ArenaFile create_arena_file(const ArenaShape& shape, ArenaPlace place) {
  const ArenaLayout layout(checked(shape));
  ArenaFile file;
  file.token = random_token();
  file.fd = make_file(place, file.token, file.path);
  if (file.fd < 0) {
    throw CollectiveError("cannot create " + file.path + " for the group's shared memory: " + std::strerror(errno));
  }
  try {
    write_header(file.fd, layout, file.token);
  } catch (...) {
    unlink_arena_file(file);
    close(file.fd);
    throw;
  }
  return file;
}

int open_arena_file(const std::string& path, uint64_t token) {
  // The path comes through a store that others may be able to write to. A memfd is always behind a link.
  const bool named = path.compare(0, 9, "/dev/shm/") == 0;
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (named ? O_NOFOLLOW : 0));
  if (fd < 0) {
    throw CollectiveError("cannot open the group's shared memory at " + path + ": " + std::strerror(errno));
  }
  struct stat status = {};
  if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
    close(fd);
    throw CollectiveError(path + " belongs to user " + std::to_string(status.st_uid) + ", this process to user " +
                          std::to_string(geteuid()) +
                          ": the ranks of a group must run as one user (or somebody else writes to their store)");
  }
  uint64_t fields[2] = {};
  const bool read = pread(fd, fields, sizeof(fields), 0) == static_cast<ssize_t>(sizeof(fields));
  if (!read || fields[0] != kArenaMagic || fields[1] != token) {
    close(fd);
    throw CollectiveError(path + " is not the shared memory that the group's creator made (another pid namespace?)");
  }
  return fd;
}

void unlink_arena_file(const ArenaFile& file) {
  if (file.path.compare(0, 9, "/dev/shm/") == 0) unlink(file.path.c_str());
}

size_t default_heap_bytes(int size) {
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(memory / 2, size_t{64} << 30) / static_cast<size_t>(std::max(size, 1)) / kPage * kPage;
}

}  // namespace opensmd
