// The floor's all-reduces: sums of floats over all ranks, in place.
//
//   private tensors, payload up to 8 KiB (one-shot): every rank copies its data into its slot, raises its flag, waits
//       for all flags and sums all slots. Two sets of slots in turn, so nothing waits for readers.
//   above (two-shot): rank r sums the r-th part of the tensor, piece by piece.
//       put     copy a piece of the others' parts into my rings to them
//       reduce  add what the others put for me to a piece of my part; leave the sums where they put it
//       get     copy the sums out of my rings
//     Up to a few MiB each stage is four pieces, often everything, behind the one before. In larger tensors it is one
//     piece behind, and two ranks read four pages at a time (more ranks do better without). The rings' positions move
//     on from call to call: a slot written while others still have it in their caches costs four times as much.
//   tensors in shared memory (zero-copy): every rank sums its part over all tensors straight into all tensors.
//
// All but one-shot turn round in every call: it begins at the end that the last call has left in the caches.
#pragma once
#include <algorithm>

#include "flags.hpp"
#include "lines.hpp"

namespace floor_ {

constexpr int kMaxRanks = 8;
constexpr int64_t kOneShot = (8 << 10) / 4;
constexpr int64_t kRing = (1 << 20) / 4;  // the longest: large tensors take half, and more ranks than two a quarter

// One rank's room. Zeroed memory is a valid empty one.
struct alignas(4096) Room {
  Flag flag, put, reduced;
  alignas(4096) float one_shot[2][kOneShot];
  alignas(4096) float to[kMaxRanks][kRing];
};

class AllReduce {
 public:
  AllReduce(Room* rooms, int rank, int size) : rooms_(rooms), rank_(rank), size_(size) {}

  // Every rank raises its flag and waits for all others: the least that any collective must do.
  void flags() {
    raise(rooms_[rank_].flag, ++turn_);
    for (int r = 0; r < size_; r++) wait_for(rooms_[r].flag, turn_);
  }

  void run(float* data, int64_t count) {
    if (count <= kOneShot) one_shot(data, count); else TwoShot(*this, data, count).run();
  }

  // `tensors` are all ranks', one every `stride` floats.
  void zero_copy(float* tensors, int64_t stride, int64_t count) {
    flags();
    const int64_t begin = count * rank_ / size_, length = count * (rank_ + 1) / size_ - begin;
    const auto sum = [=, first = tensors + begin, size = size_](int64_t i, auto unit) {
      using Unit = decltype(unit);
      Unit total = as<Unit>(first + i);
      for (int r = 1; r < size; r++) total.v += as<Unit>(first + r * stride + i).v;
      for (int r = 0; r < size; r++) as<Unit>(first + r * stride + i) = total;
    };
    if (turn_ & 2) each_line(length, sum); else each_line_backwards(length, sum);
    flags();
  }

 private:
  void one_shot(float* data, int64_t count) {
    const int side = (turn_ + 1) & 1;
    copy(rooms_[rank_].one_shot[side], data, count);
    flags();
    add(data, rooms_[0].one_shot[side], rooms_[1 % size_].one_shot[side], count);
    for (int r = 2; r < size_; r++) add(data, data, rooms_[r].one_shot[side], count);
  }

  class TwoShot {
   public:
    TwoShot(AllReduce& on, float* data, int64_t count)
        : on_(on), data_(data), count_(count), me_(on.rooms_[on.rank_]), large_(count >= kLarge),
          pages_(large_ && on.size_ == 2), ring_(kRing / (large_ ? 2 : 1) / (on.size_ > 2 ? 4 : 1)) {
      const int64_t part = (count + on.size_ - 1) / on.size_, largest = large_ ? 16 << 10 : ring_ / 8;
      while (piece_ < largest && piece_ * 4 < part) piece_ *= 2;
      pieces_ = (part + piece_ - 1) / piece_;
      first_ = (on.done_ + piece_ - 1) / piece_ * piece_;
    }

    void run() {
      const int64_t lag = large_ ? 1 : 4;
      for (int64_t i = 0; i < pieces_ + 2 * lag; i++) {
        if (i >= 2 * lag) get(i - 2 * lag);  // the next goes to where this lay, if a ring is so short
        if (i < pieces_) put(i);
        if (i >= lag && i < pieces_ + lag) reduce(i - lag);
      }
      on_.done_ = first_ + pieces_ * piece_;
      on_.backwards_ = !on_.backwards_;
    }

   private:
    struct Piece {
      float* data;
      int64_t length;
    };
    // Of part `r`; the last piece is shorter, or empty where parts differ by one float.
    Piece piece(int r, int64_t i) const {
      const int64_t begin = count_ * r / on_.size_, end = count_ * (r + 1) / on_.size_;
      const int64_t at = begin + (on_.backwards_ ? pieces_ - 1 - i : i) * piece_;
      return {data_ + at, std::max<int64_t>(std::min(piece_, end - at), 0)};
    }
    int64_t position(int64_t i) const { return first_ + i * piece_; }
    float* in_ring(float* ring, int64_t i) const { return ring + position(i) % ring_; }

    void wait(Flag Room::* flag, int64_t i) {
      for (int r = 0; r < on_.size_; r++) {
        if (r != on_.rank_) wait_for(on_.rooms_[r].*flag, position(i + 1));
      }
    }

    // There is room: what lay there has come back to me, and I have taken it.
    void put(int64_t i) {
      for (int r = 0; r < on_.size_; r++) {
        const Piece from = piece(r, i);
        if (r != on_.rank_) (pages_ ? copy_from_memory : copy)(in_ring(me_.to[r], i), from.data, from.length);
      }
      raise(me_.put, position(i + 1));
    }

    void reduce(int64_t i) {
      wait(&Room::put, i);
      const Piece mine = piece(on_.rank_, i);
      float* theirs[kMaxRanks] = {};
      int others = 0;
      for (int r = 0; r < on_.size_; r++) {
        if (r != on_.rank_) theirs[others++] = in_ring(on_.rooms_[r].to[on_.rank_], i);
      }
      const auto sum = [=](int64_t at, auto unit) {
        using Unit = decltype(unit);
        Unit total = as<Unit>(mine.data + at);
        for (int k = 0; k < others; k++) total.v += as<Unit>(theirs[k] + at).v;
        as<Unit>(mine.data + at) = total;
        for (int k = 0; k < others; k++) as<Unit>(theirs[k] + at) = total;
      };
      if (pages_) each_line_of_four_pages(mine.length, mine.data, sum); else each_line(mine.length, sum);
      raise(me_.reduced, position(i + 1));
    }

    void get(int64_t i) {
      wait(&Room::reduced, i);
      for (int r = 0; r < on_.size_; r++) {
        const Piece to = piece(r, i);
        if (r != on_.rank_) copy(to.data, in_ring(me_.to[r], i), to.length);
      }
    }

    AllReduce& on_;
    float* const data_;
    const int64_t count_;
    Room& me_;
    const bool large_;
    const bool pages_;
    const int64_t ring_;
    int64_t piece_ = 1 << 10, pieces_, first_;
  };

  Room* rooms_;
  const int rank_, size_;
  int64_t turn_ = 0, done_ = 0;
  bool backwards_ = false;
};

}  // namespace floor_
