// The machine's own limits for ranks that share memory: flags with one writer each, plain copies and sums, and
// an all-reduce made of nothing else. No time limits, no check that a peer lives, no types but float: what a
// library adds to these numbers is the price of being usable.
//
//   payload up to 32 KiB (one-shot): every rank copies its data into its slot, raises its flag, waits for all
//       flags and sums all slots. Two sets of slots in turn, so nothing waits for readers.
//   above (two-shot), in chunks of 128 KiB a rank, each stage one chunk behind the one before:
//       put     copy the parts that others will sum into my slot
//       reduce  sum my part of the chunk over my own data and everybody's slots; leave it in my slot too
//       get     copy the others' finished parts out of their slots
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>

namespace floor_ {

constexpr int kMaxRanks = 8;
constexpr int64_t kOneShot = 32 << 10;
constexpr int64_t kChunk = 128 << 10;  // bytes of a chunk that one rank sums
constexpr int kDepth = 4;

inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

struct alignas(128) Flag {
  std::atomic<int64_t> value;
};

// One rank's room: a flag for each stage, then slots. Zeroed memory is a valid empty arena.
struct alignas(4096) Room {
  Flag flag, put, reduced, got;
  alignas(4096) float one_shot[2][kOneShot / 4];
  alignas(4096) float slots[kDepth][kMaxRanks * kChunk / 4];
};

struct Arena {
  Room rooms[kMaxRanks];
};

// Spin for about a microsecond, then let others run: ranks may share a core.
inline void wait_for(const std::atomic<int64_t>& flag, int64_t value) {
  for (int spins = 0; flag.load(std::memory_order_acquire) < value; spins++) {
    if (spins < 50) _mm_pause(); else sched_yield();
  }
}

inline void raise(std::atomic<int64_t>& flag, int64_t value) { flag.store(value, std::memory_order_release); }

class Rank {
 public:
  Rank(Arena* arena, int rank, int size) : rooms_(arena->rooms), rank_(rank), size_(size) {}

  // Every rank raises its flag and waits for all others: the least that any collective must do.
  void flags() {
    raise(rooms_[rank_].flag.value, ++turn_);
    for (int r = 0; r < size_; r++) wait_for(rooms_[r].flag.value, turn_);
  }

  void all_reduce(float* data, int64_t count) {
    if (count * 4 <= kOneShot) one_shot(data, count); else two_shot(data, count);
  }

 private:
  void one_shot(float* data, int64_t count) {
    const int side = (turn_ + 1) & 1;
    memcpy(rooms_[rank_].one_shot[side], data, count * 4);
    flags();
    sum(data, rooms_[0].one_shot[side], rooms_[1 % size_].one_shot[side], count);
    for (int r = 2; r < size_; r++) sum(data, data, rooms_[r].one_shot[side], count);
  }

  void two_shot(float* data, int64_t count) {
    const int64_t step = size_ * (kChunk / 4);
    const int64_t chunks = (count + step - 1) / step;
    for (int64_t c = 0; c < chunks + 2; c++) {
      if (c < chunks) put(data, count, c);
      if (c >= 1 && c - 1 < chunks) reduce(data, count, c - 1);
      if (c >= 2) get(data, count, c - 2);
    }
    done_ += chunks;
  }

  // Part `r` of chunk `c`: where it begins and how long it is.
  int64_t begin(int64_t c, int r, int64_t count) const {
    const int64_t start = c * size_ * (kChunk / 4), length = std::min(count - start, size_ * (kChunk / 4));
    return start + length * r / size_;
  }

  float* slot(int room, int64_t c, int part) {
    return rooms_[room].slots[(done_ + c) % kDepth] + part * (kChunk / 4);
  }

  void put(float* data, int64_t count, int64_t c) {
    for (int r = 0; r < size_; r++) wait_for(rooms_[r].got.value, done_ + c - kDepth + 1);
    for (int r = 0; r < size_; r++) {
      const int64_t at = begin(c, r, count), length = begin(c, r + 1, count) - at;
      if (r != rank_) memcpy(slot(rank_, c, r), data + at, length * 4);
    }
    raise(rooms_[rank_].put.value, done_ + c + 1);
  }

  void reduce(float* data, int64_t count, int64_t c) {
    const int64_t at = begin(c, rank_, count), length = begin(c, rank_ + 1, count) - at;
    float* mine = data + at;
    for (int r = 0; r < size_; r++) wait_for(rooms_[r].put.value, done_ + c + 1);
    for (int r = 0; r < size_; r++) {
      if (r != rank_) sum(mine, mine, slot(r, c, rank_), length);
    }
    memcpy(slot(rank_, c, rank_), mine, length * 4);
    raise(rooms_[rank_].reduced.value, done_ + c + 1);
  }

  void get(float* data, int64_t count, int64_t c) {
    for (int r = 0; r < size_; r++) {
      if (r == rank_) continue;
      const int64_t at = begin(c, r, count), length = begin(c, r + 1, count) - at;
      wait_for(rooms_[r].reduced.value, done_ + c + 1);
      memcpy(data + at, slot(r, c, r), length * 4);
    }
    raise(rooms_[rank_].got.value, done_ + c + 1);
  }

  static void sum(float* out, const float* a, const float* b, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = a[i] + b[i];
  }

  Room* rooms_;
  const int rank_, size_;
  int64_t turn_ = 0, done_ = 0;
};

}  // namespace floor_
