// The machine's own limits for ranks that share memory: flags with one writer each, plain copies and sums, and
// collectives made of nothing else. No time limits, no check that a peer lives, no types but float: what a
// library adds to these numbers is the price of being usable.
#pragma once
#include "all_reduce.hpp"
#include "streams.hpp"

namespace floor_ {

// Zeroed memory is a valid empty arena; what nobody uses takes no memory.
struct Arena {
  Room rooms[kMaxRanks];
  Stream one_way[2], both_ways[2];
};

class Rank {
 public:
  Rank(Arena* arena, int rank, int size)
      : rank_(rank), all_reduce_(arena->rooms, rank, size),
        one_way_(arena->one_way[rank & 1], arena->one_way[~rank & 1], kOneWayRing),
        both_ways_(arena->both_ways[rank & 1], arena->both_ways[~rank & 1], kBothWaysRing) {}

  void flags() { all_reduce_.flags(); }
  void all_reduce(float* data, int64_t count) { all_reduce_.run(data, count); }
  void zero_copy(float* tensors, int64_t stride, int64_t count) { all_reduce_.zero_copy(tensors, stride, count); }

  // The others are for two ranks. `count` is that of the whole message.
  void broadcast(float* data, int64_t count) {
    rank_ == 0 ? one_way_.give(data, count) : one_way_.take(data, count);
  }

  void send_and_back(float* data, int64_t count) {
    if (rank_ == 0) one_way_.give(data, count);
    one_way_.take(data, count);
    if (rank_ == 1) one_way_.give(data, count);
  }

  void all_gather(const float* in, float* out, int64_t count) {
    const int64_t part = count / 2;
    both_ways_.exchange(in, out + theirs(part), in, out + mine(part), part);
  }

  void all_to_all(const float* in, float* out, int64_t count) {
    const int64_t part = count / 2;
    both_ways_.exchange(in + theirs(part), out + theirs(part), in + mine(part), out + mine(part), part);
  }

  void reduce_scatter(const float* in, float* out, int64_t count) {
    const int64_t part = count / 2;
    both_ways_.reduce(in + theirs(part), out, in + mine(part), part);
  }

 private:
  int64_t mine(int64_t part) const { return rank_ * part; }
  int64_t theirs(int64_t part) const { return (1 - rank_) * part; }

  const int rank_;
  AllReduce all_reduce_;
  Streams one_way_, both_ways_;
};

}  // namespace floor_
