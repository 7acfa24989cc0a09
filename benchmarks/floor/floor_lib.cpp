// The floor's collectives as contestants in the ranks of the other benchmarks.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "floor.hpp"

namespace {

void* map(const char* path, int64_t bytes) {
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes) != 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

// A letter is one of mpi_loop.c's, or 'z': the zero-copy all-reduce, `out` being rank 0's tensor, `in` rank 1's.
void call(floor_::Rank& rank, char letter, float* in, float* out, int64_t count) {
  switch (letter) {
    case 'r': return rank.all_reduce(out, count);
    case 'z': return rank.zero_copy(out, in - out, count);
    case 'b': return rank.broadcast(out, count);
    case 'g': return rank.all_gather(in, out, count);
    case 's': return rank.reduce_scatter(in, out, count);
    case 'a': return rank.all_to_all(in, out, count);
    case 'p': return rank.send_and_back(out, count);
    default: return rank.flags();
  }
}

}  // namespace

extern "C" {

// `path` is a file in shared memory that all ranks open; the first to come makes it large enough.
void* floor_join(const char* path, int rank, int size) {
  void* memory = map(path, sizeof(floor_::Arena));
  return memory == nullptr ? nullptr : new floor_::Rank(static_cast<floor_::Arena*>(memory), rank, size);
}

void floor_loop(void* rank, char letter, float* in, float* out, int64_t count, int64_t* stamps, int calls) {
  stamps[0] = floor_::now();
  for (int i = 1; i <= calls; i++) {
    call(*static_cast<floor_::Rank*>(rank), letter, in, out, count);
    stamps[i] = floor_::now();
  }
}
}
