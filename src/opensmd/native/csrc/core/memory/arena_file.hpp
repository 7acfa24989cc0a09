// An arena's file: how it is created, found by the other members, and made nameless again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace opensmd {

// Numbers that all members must agree on: the creator chooses, and the file's header tells the others.
struct ArenaShape {
  int size = 1;                       // members, 1 to 64
  size_t heap_bytes = 0;              // zero-copy heap of EACH member, virtual; pages appear on allocation
  size_t staging_bytes = 256u << 10;  // one-shot up to this many bytes; at most chunk_bytes
  size_t chunk_bytes = 512u << 10;    // one step of the pipelines
  size_t zero_copy_bytes = 16u << 10; // below this, staging is faster than agreeing on addresses
  size_t ring_bytes = 1u << 20;       // mailbox ring of each ordered pair, and
  size_t long_ring_bytes = 2u << 20;  // the one for messages of 24 MiB and more
};

enum class ArenaPlace {
  Memfd,   // no name anywhere; peers open /proc/<pid>/fd/<n>; needs one pid namespace
  DevShm,  // an O_EXCL file in /dev/shm for members that share no pid namespace; unlink once all have opened it
};

struct ArenaFile {
  int fd = -1;         // the caller closes it once its Group is constructed (a memfd's creator: once all have opened it)
  std::string path;    // what peers open
  uint64_t token = 0;  // proves to peers that they opened the right file
};

ArenaFile create_arena_file(const ArenaShape& shape, ArenaPlace place = ArenaPlace::Memfd);
int open_arena_file(const std::string& path, uint64_t token);  // throws CollectiveError saying what it found instead
void unlink_arena_file(const ArenaFile& file);
size_t default_heap_bytes(int size);  // min(RAM / 2, 64 GiB) shared by `size` members

}  // namespace opensmd
