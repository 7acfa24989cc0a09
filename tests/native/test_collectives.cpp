// Every collective against the reference, ranks as threads, over dtypes, reductions, sizes and numbers of ranks.
#include <chrono>
#include <map>
#include <random>
#include <thread>
#include <tuple>

#include "core/algorithms/all_reduce.hpp"
#include "core/algorithms/broadcast.hpp"
#include "harness.hpp"
#include "reference.hpp"

using namespace opensmd;

namespace {

// The sanitizer is for the protocol, which does not depend on dtypes; it slows the rest down tenfold.
#if defined(__SANITIZE_THREAD__)
constexpr int kMostRanks = 3;
const std::vector<size_t> kSizes = {0, 1, 60, 2500, 40000};
const std::vector<DType> kDTypes = {DType::F32, DType::BF16};
const std::vector<Reduction> kReductions = {Reduction::Sum, Reduction::PremulSum};
#else
constexpr int kMostRanks = 5;
const std::vector<size_t> kSizes = {0, 1, 2, 13, 14, 15, 57, 1000, 4096, 5003, 40001, 100003};
const std::vector<DType>& kDTypes = reference::all_dtypes();
const std::vector<Reduction>& kReductions = reference::all_reductions();
#endif

using Bytes = std::vector<unsigned char>;

Bytes array_of(DType dtype, size_t count, int rank, uint64_t seed, size_t first = 0) {
  Bytes bytes(count * size_of(dtype));
  reference::fill(dtype, bytes.data(), count, rank, seed, first);
  return bytes;
}

Bytes compute_reduced(DType dtype, Reduction reduction, size_t count, int ranks, uint64_t seed, size_t first) {
  std::vector<Bytes> arrays;
  std::vector<const void*> pointers;
  for (int r = 0; r < ranks; ++r) arrays.push_back(array_of(dtype, count, r, seed, first));
  for (const Bytes& array : arrays) pointers.push_back(array.data());
  Bytes out(count * size_of(dtype));
  reference::reduce(dtype, reduction, pointers, out.data(), count);
  return out;
}

// Elements [first, first + count) of the reduction; computed by the first rank that asks.
const Bytes& reduced(DType dtype, Reduction reduction, size_t count, int ranks, uint64_t seed, size_t first = 0) {
  static std::mutex mutex;
  static std::map<std::tuple<DType, Reduction, size_t, int, uint64_t, size_t>, Bytes> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(dtype, reduction, count, ranks, seed, first);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = compute_reduced(dtype, reduction, count, ranks, seed, first);
}

void expect(const Bytes& got, const Bytes& wanted, const std::string& what) {
  CHECK(got.size() == wanted.size(), what);
  if (got == wanted) return;
  for (size_t i = 0; i < got.size(); ++i) {
    CHECK(got[i] == wanted[i], what << " differs at byte " << i << " of " << got.size() << ": " << int(got[i])
                                    << " instead of " << int(wanted[i]));
  }
}

std::string title(const char* what, Group& group, DType dtype, size_t count) {
  return std::string(what) + " " + name_of(dtype) + " count " + std::to_string(count) + " on rank " +
         std::to_string(group.rank()) + " of " + std::to_string(group.size());
}

template <class Body>
void for_every_number_of_ranks(const Body& body) {
  for (int n = 1; n <= kMostRanks; ++n) harness::run_ranks(harness::small_shape(n), [&](Group& group) { body(group); });
}

// The path through memory depends only on the size: all sizes with one dtype and reduction, two with the others.
std::vector<size_t> sizes_for(DType dtype, Reduction reduction) {
  if (dtype == DType::F32 && reduction == Reduction::Sum) return kSizes;
  return {3, 4001};
}

void all_reduce_table(Group& group, bool in_heap) {
  for (const DType dtype : kDTypes) {
    for (const Reduction reduction : kReductions) {
      if (!reducible(dtype, reduction)) continue;
      for (const size_t count : sizes_for(dtype, reduction)) {
        const uint64_t seed = count + static_cast<uint64_t>(reduction);
        const Bytes mine = array_of(dtype, count, group.rank(), seed);
        Bytes own(mine.size());
        unsigned char* data = in_heap ? static_cast<unsigned char*>(group.heap_allocate(mine.size())) : own.data();
        if (!mine.empty()) std::memcpy(data, mine.data(), mine.size());
        group.all_reduce(data, count, dtype, reduction, reference::factor_of(group.rank()));
        const std::string what = title("all_reduce", group, dtype, count) + " " + name_of(reduction);
        expect(Bytes(data, data + mine.size()), reduced(dtype, reduction, count, group.size(), seed), what);
        if (in_heap) group.heap_free(data);
      }
    }
  }
}

TEST(all_reduce, "all_reduce equals the reference for every dtype, reduction, size and number of ranks") {
  for_every_number_of_ranks([](Group& group) { all_reduce_table(group, false); });
}

TEST(all_reduce_heap, "all_reduce of tensors in the heap equals the reference") {
  for_every_number_of_ranks([](Group& group) { all_reduce_table(group, true); });
}

TEST(all_reduce_mixed, "all_reduce works where only some ranks have their tensor in the heap") {
  for_every_number_of_ranks([](Group& group) {
    for (const size_t count : kSizes) {
      Bytes data = array_of(DType::F32, count, group.rank(), count);
      void* block = group.heap_allocate(data.size() + 4096);
      void* tensor = group.rank() % 2 ? block : data.data();
      if (!data.empty()) std::memcpy(tensor, array_of(DType::F32, count, group.rank(), count).data(), data.size());
      group.all_reduce(tensor, count, DType::F32, Reduction::Sum);
      if (!data.empty()) std::memcpy(data.data(), tensor, data.size());
      expect(data, reduced(DType::F32, Reduction::Sum, count, group.size(), count), "mixed all_reduce");
      group.heap_free(block);
    }
  });
}

TEST(reduce, "reduce equals the reference on the root and leaves inputs alone") {
  for_every_number_of_ranks([](Group& group) {
    for (const DType dtype : {DType::F32, DType::BF16, DType::I64, DType::C128}) {
      for (const Reduction reduction : {Reduction::Sum, Reduction::Average, Reduction::Product, Reduction::PremulSum}) {
        if (!reducible(dtype, reduction)) continue;
        for (const size_t count : sizes_for(dtype, reduction)) {
          const int root = static_cast<int>(count % static_cast<size_t>(group.size()));
          const Bytes mine = array_of(dtype, count, group.rank(), count);
          Bytes in = mine;
          Bytes out(group.rank() == root ? in.size() : 0);
          group.reduce(in.data(), group.rank() == root ? out.data() : nullptr, count, dtype, reduction, root,
                       reference::factor_of(group.rank()));
          expect(in, mine, title("input of reduce", group, dtype, count));
          if (group.rank() != root) continue;
          const Bytes wanted = reduced(dtype, reduction, count, group.size(), count);
          expect(out, wanted, title("reduce", group, dtype, count));
        }
      }
    }
  });
}

// The tensor is in the heap of every rank, of no rank, or of the even ranks.
constexpr int kPlaces = 3;
bool in_heap(int place, int rank) { return place == 0 || (place == 2 && rank % 2 == 0); }

class Tensor {
 public:
  Tensor(Group& group, int place, size_t bytes)
      : group_(group), bytes_(bytes), own_(bytes),
        block_(in_heap(place, group.rank()) ? group.heap_allocate(bytes) : nullptr) {}
  ~Tensor() { group_.heap_free(block_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  unsigned char* data() { return block_ ? static_cast<unsigned char*>(block_) : own_.data(); }
  void operator=(const Bytes& bytes) {
    if (!bytes.empty()) std::memcpy(data(), bytes.data(), bytes.size());
  }
  Bytes bytes() { return Bytes(data(), data() + bytes_); }
  Bytes bytes(size_t offset, size_t count) { return Bytes(data() + offset, data() + offset + count); }

 private:
  Group& group_;
  size_t bytes_;
  Bytes own_;
  void* block_;
};

TEST(reduce_heap, "reduce in place equals the reference wherever the tensors lie, and leaves those of others alone") {
  for_every_number_of_ranks([](Group& group) {
    for (int place = 0; place < kPlaces; ++place) {
      for (const size_t count : kSizes) {
        const int root = static_cast<int>(count % static_cast<size_t>(group.size()));
        const Bytes mine = array_of(DType::F32, count, group.rank(), count);
        Tensor tensor(group, place, mine.size());
        tensor = mine;
        void* out = group.rank() == root ? tensor.data() : nullptr;
        group.reduce(tensor.data(), out, count, DType::F32, Reduction::Sum, root);
        const Bytes wanted =
            group.rank() == root ? reduced(DType::F32, Reduction::Sum, count, group.size(), count) : mine;
        expect(tensor.bytes(), wanted, title("reduce", group, DType::F32, count));
      }
    }
  });
}

TEST(broadcast, "broadcast gives every rank the root's bytes") {
  for_every_number_of_ranks([](Group& group) {
    for (int place = 0; place < kPlaces; ++place) {
      for (const size_t count : kSizes) {
        const int root = static_cast<int>((count + 1) % static_cast<size_t>(group.size()));
        Tensor tensor(group, place, count * 4);
        tensor = array_of(DType::F32, count, group.rank(), count);
        group.broadcast(tensor.data(), count, DType::F32, root);
        expect(tensor.bytes(), array_of(DType::F32, count, root, count), title("broadcast", group, DType::F32, count));
      }
    }
  });
}

TEST(run_ahead, "a root that is ahead of its readers overwrites nothing that they have not read") {
  for_every_number_of_ranks([](Group& group) {
    std::mt19937 random(12);  // the same on all ranks
    std::mt19937 own(static_cast<unsigned>(group.rank()));
    for (uint64_t round = 0; round < 120; ++round) {
      // Streams of one to eight steps, sometimes with other slots, or from another root.
      const size_t count = 3500 * (1 + random() % 8);
      const int root = random() % 8 == 0 ? static_cast<int>(random()) & 1 : 0;
      if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds{own() % 500});
      Bytes data = array_of(DType::F32, count, group.rank(), round);
      if (random() % 8 == 0) group.all_reduce(data.data(), count, DType::F32, Reduction::Sum);
      data = array_of(DType::F32, count, group.rank(), round);
      group.broadcast(data.data(), count, DType::F32, root % group.size());
      expect(data, array_of(DType::F32, count, root % group.size(), round), "broadcast of a root that is ahead");
    }
  });
}

TEST(all_gather, "all_gather collects uneven arrays, also in place") {
  for_every_number_of_ranks([](Group& group) {
    const size_t n = static_cast<size_t>(group.size());
    const size_t rank = static_cast<size_t>(group.rank());
    for (int place = 0; place < kPlaces; ++place) {
      for (const size_t count : kSizes) {
        std::vector<size_t> counts(n);
        std::vector<size_t> offsets(n + 1);
        for (size_t i = 0; i < n; ++i) {
          counts[i] = count + (count % 2 ? i * 31 : 0);
          offsets[i + 1] = offsets[i] + counts[i];
        }
        const Bytes mine = array_of(DType::I16, counts[rank], group.rank(), count);
        Tensor out(group, place, offsets[n] * 2);
        std::vector<void*> outs;
        for (size_t i = 0; i < n; ++i) outs.push_back(out.data() + offsets[i] * 2);
        const bool in_place = count % 3 == 0;
        if (in_place && !mine.empty()) std::memcpy(outs[rank], mine.data(), mine.size());
        group.all_gather(in_place ? outs[rank] : mine.data(), outs.data(), counts.data(), DType::I16);
        for (size_t i = 0; i < n; ++i) {
          expect(out.bytes(offsets[i] * 2, counts[i] * 2), array_of(DType::I16, counts[i], static_cast<int>(i), count),
                 title("all_gather", group, DType::I16, count));
        }
      }
    }
  });
}

TEST(gather_scatter, "gather collects on the root, and scatter undoes it") {
  for_every_number_of_ranks([](Group& group) {
    const size_t n = static_cast<size_t>(group.size());
    for (int place = 0; place < kPlaces; ++place) {
      for (const size_t count : kSizes) {
        const int root = static_cast<int>((count + 2) % n);
        Tensor mine(group, place, count * 4);
        mine = array_of(DType::I32, count, group.rank(), count);
        Tensor all(group, place, count * n * 4);
        std::vector<void*> outs;
        for (size_t i = 0; i < n; ++i) outs.push_back(all.data() + i * count * 4);
        const bool is_root = group.rank() == root;
        group.gather(mine.data(), is_root ? outs.data() : nullptr, count, DType::I32, root);
        for (size_t i = 0; i < n && is_root; ++i) {
          expect(all.bytes(i * count * 4, count * 4), array_of(DType::I32, count, static_cast<int>(i), count),
                 title("gather", group, DType::I32, count));
        }
        Tensor back(group, place, count * 4);
        group.scatter(is_root ? outs.data() : nullptr, back.data(), count, DType::I32, root);
        expect(back.bytes(), mine.bytes(), title("scatter", group, DType::I32, count));
      }
    }
  });
}

TEST(reduce_scatter, "reduce_scatter reduces uneven parts, also in place") {
  for_every_number_of_ranks([](Group& group) {
    const size_t n = static_cast<size_t>(group.size());
    const size_t rank = static_cast<size_t>(group.rank());
    for (const DType dtype : {DType::F32, DType::BF16, DType::U8, DType::C128}) {
      for (const Reduction reduction : {Reduction::Sum, Reduction::Average, Reduction::PremulSum}) {
        if (!reducible(dtype, reduction)) continue;
        for (const size_t count : sizes_for(dtype, reduction)) {
          const int place = static_cast<int>((count + n) % kPlaces);
          std::vector<size_t> counts(n);
          std::vector<size_t> offsets(n + 1);
          for (size_t i = 0; i < n; ++i) {
            counts[i] = count % 2 ? (i * 7919 + count) % (2 * count) : count;
            offsets[i + 1] = offsets[i] + counts[i];
          }
          const size_t element = size_of(dtype);
          Tensor in(group, place, offsets[n] * element);
          in = array_of(dtype, offsets[n], group.rank(), count);
          std::vector<const void*> ins;
          for (size_t i = 0; i < n; ++i) ins.push_back(in.data() + offsets[i] * element);
          Bytes own(counts[rank] * element);
          const bool in_place = count % 3 == 0;
          void* out = in_place ? in.data() + offsets[rank] * element : own.data();
          group.reduce_scatter(ins.data(), counts.data(), out, dtype, reduction, reference::factor_of(group.rank()));
          if (in_place) own = in.bytes(offsets[rank] * element, own.size());
          expect(own, reduced(dtype, reduction, counts[rank], group.size(), count, offsets[rank]),
                 title("reduce_scatter", group, dtype, count));
        }
      }
    }
  });
}

TEST(all_to_all, "all_to_all moves every pair's piece, whatever its size") {
  for_every_number_of_ranks([](Group& group) {
    const size_t n = static_cast<size_t>(group.size());
    const size_t rank = static_cast<size_t>(group.rank());
    std::mt19937 random(7);  // the same on all ranks
    for (int round = 0; round < 24; ++round) {
      const int place = round % kPlaces;
      const size_t most = kSizes[static_cast<size_t>(round) % kSizes.size()] / n + 1;
      std::vector<std::vector<size_t>> counts(n, std::vector<size_t>(n));
      for (auto& row : counts) {
        for (size_t& count : row) count = round % 4 == 0 ? most - 1 : random() % most * (random() % 3 != 0);
      }
      size_t given = 0;
      size_t taken = 0;
      for (size_t i = 0; i < n; ++i) given += counts[rank][i];
      for (size_t i = 0; i < n; ++i) taken += counts[i][rank];
      Tensor in(group, place, given * 8);
      Tensor out(group, place, taken * 8);
      std::vector<const void*> ins;
      std::vector<void*> outs;
      std::vector<size_t> out_counts;
      size_t offset = 0;
      for (size_t i = 0; i < n; ++i) {
        const Bytes piece = array_of(DType::I64, counts[rank][i], group.rank(), i);
        if (!piece.empty()) std::memcpy(in.data() + offset, piece.data(), piece.size());
        ins.push_back(in.data() + offset);
        offset += piece.size();
      }
      offset = 0;
      for (size_t i = 0; i < n; ++i) {
        outs.push_back(out.data() + offset);
        out_counts.push_back(counts[i][rank]);
        offset += counts[i][rank] * 8;
      }
      group.all_to_all(ins.data(), counts[rank].data(), outs.data(), out_counts.data(), DType::I64);
      offset = 0;
      for (size_t i = 0; i < n; ++i) {
        expect(out.bytes(offset, out_counts[i] * 8), array_of(DType::I64, out_counts[i], static_cast<int>(i), rank),
               title("all_to_all", group, DType::I64, out_counts[i]));
        offset += out_counts[i] * 8;
      }
    }
  });
}

TEST(mixture, "a random sequence of collectives of random sizes keeps its order and its numbers") {
  for_every_number_of_ranks([](Group& group) {
    std::mt19937 random(11);  // the same on all ranks
    const size_t n = static_cast<size_t>(group.size());
    for (uint64_t round = 0; round < 150; ++round) {
      const size_t count = random() % (1u << random() % 16);
      const int root = static_cast<int>(random() % n);
      Bytes data = array_of(DType::F32, count, group.rank(), round);
      switch (random() % 4) {
        case 0:
          group.barrier();
          break;
        case 1:
          group.broadcast(data.data(), count, DType::F32, root);
          expect(data, array_of(DType::F32, count, root, round), "broadcast in a mixture");
          break;
        case 2: {
          Bytes out(data.size() * n);
          std::vector<void*> outs;
          for (size_t i = 0; i < n; ++i) outs.push_back(out.data() + i * data.size());
          group.gather(data.data(), outs.data(), count, DType::F32, root);
          break;
        }
        default:
          group.all_reduce(data.data(), count, DType::F32, Reduction::Sum);
          expect(data, reduced(DType::F32, Reduction::Sum, count, group.size(), round), "all_reduce in a mixture");
      }
      CHECK(group.sequence() == round + 1, "");
    }
  });
}

// As if this many calls had been made before.
void begin_at(Context& context, uint32_t count) {
  context.sequence = context.steps = context.finishes = count;
  opensmd::Member& own = context.arena.member(context.rank);
  for (Flag* flag : {&own.published, &own.reduced, &own.consumed, &own.finished}) flag->value.store(count);
  for (Entry& entry : own.entries) entry.sequence.store(count);
}

TEST(wrap_around, "calls go on where their counters wrap around") {
  for (const uint32_t begin : {0x7fffffe0u, 0xffffffe0u}) {
    std::atomic<int> ready{0};
    harness::run_ranks<Context>(harness::small_shape(3), [&](Context& context) {
      begin_at(context, begin);
      for (++ready; ready < context.size;) std::this_thread::yield();
      std::vector<float> data(20000);
      auto* block = static_cast<float*>(context.heap.allocate(data.size() * sizeof(float)));
      for (int round = 0; round < 60; ++round) {
        float* const tensor = round % 3 == 0 ? block : data.data();
        std::fill(tensor, tensor + data.size(), 1.0f);
        all_reduce(context, {tensor, data.size(), DType::F32, Reduction::Sum, 1.0}, {});
        CHECK(std::all_of(tensor, tensor + data.size(), [](float sum) { return sum == 3; }), round);
        const int root = round % 3;
        std::fill(tensor, tensor + data.size(), static_cast<float>(context.rank == root ? round : -1));
        broadcast(context, {tensor, data.size(), DType::F32, root}, {});
        CHECK(std::all_of(tensor, tensor + data.size(), [&](float got) { return got == round; }), round);
      }
    });
  }
}

TEST(large, "results larger than the caches arrive complete at odd addresses") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const size_t bytes = (size_t{26} << 20) + 77;
    const Bytes wanted = harness::periodic<unsigned char>(bytes, [](size_t i) { return i * 2654435761u >> 13; });
    Bytes data(bytes + 3);
    if (group.rank() == 1) std::memcpy(data.data() + 3, wanted.data(), bytes);
    group.broadcast(data.data() + 3, bytes, DType::Byte, 1);
    CHECK(std::memcmp(data.data() + 3, wanted.data(), bytes) == 0, "bytes are wrong");
  });
}

TEST(large_sums, "sums larger than the caches are complete") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const size_t count = (size_t{25} << 18) + 7;
    const auto rank = static_cast<size_t>(group.rank());
    const auto in = harness::periodic<uint32_t>(2 * count, [rank](size_t i) { return i * 2654435761u + rank; });
    const auto sums = harness::periodic<uint32_t>(2 * count, [](size_t i) { return 2 * (i * 2654435761u) + 1; });
    std::vector<uint32_t> out(count);
    const size_t counts[2] = {count, count};
    const void* ins[2] = {in.data(), in.data() + count};
    group.reduce_scatter(ins, counts, out.data(), DType::U32, Reduction::Sum);
    CHECK(std::memcmp(out.data(), sums.data() + rank * count, count * sizeof(uint32_t)) == 0, "sums are wrong");
  });
}

TEST(many_ranks, "sixty-four ranks reduce together") {
  harness::run_ranks(harness::small_shape(64), [](Group& group) {
    for (const size_t count : {size_t{5}, size_t{500}, size_t{20000}}) {
      Bytes data = array_of(DType::I32, count, group.rank(), 1);
      group.all_reduce(data.data(), count, DType::I32, Reduction::Sum);
      expect(data, reduced(DType::I32, Reduction::Sum, count, 64, 1), "all_reduce of 64 ranks");
    }
  });
}

}  // namespace

int main(int argc, char** argv) { return harness::run_all(argc, argv); }
