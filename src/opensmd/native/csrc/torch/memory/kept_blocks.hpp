// Individually mapped blocks of memory; freed ones are kept for the next allocation of their size, as long as that does
// not make the process larger than necessary.
//
//            the most that was in use at once, in this step or the last one, and a sixteenth
//   bytes    ------------------------------------------------------------------------------- limit
//              +--------------+                 what is in use and what is kept never pass it:
//      kept -> | . . +----+ . |.+-----+         before a new block is mapped, the blocks go that
//              +----+|    |+----+     +---      were freed longest ago
//    in use ->      ++    ++              |
//
// A heap cannot promise that: it leaves holes between blocks in use that no other block fits into. Steps repeat, so
// nearly every block has the size of one freed in an earlier step, whose pages are already there.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>

namespace opensmd {

class KeptBlocks {
 public:
  struct Bytes {
    size_t in_use = 0;
    size_t kept = 0;
    size_t most = 0;  // peak in use at once, in this step or the last one
  };

  void* take(size_t bytes);    // 4096-byte aligned; nullptr when there is no memory
  bool give_back(void* block);  // false if it is none of these blocks
  void end_step();              // forgets what was needed before the step that ends now
  Bytes bytes();
  std::mutex& mutex() { return mutex_; }  // for code that forks

 private:
  struct Kept {
    void* start;
    size_t bytes;
  };
  using Age = std::list<Kept>;  // oldest first

  size_t most() const;
  size_t limit() const;
  void* use(void* start, size_t bytes);
  void* reuse(size_t bytes);
  void* cut(size_t bytes);
  void keep(Kept block, Age::iterator before);
  void forget(std::multimap<size_t, Age::iterator>::iterator found);
  void unmap_down_to(size_t bytes);

  std::mutex mutex_;
  std::unordered_map<void*, size_t> used_;
  Age kept_;
  std::multimap<size_t, Age::iterator> by_size_;
  size_t in_use_ = 0;
  size_t kept_bytes_ = 0;
  size_t most_ = 0;       // peak in use at once, in this step
  size_t most_before_ = 0;  // in the previous step
};

}  // namespace opensmd
