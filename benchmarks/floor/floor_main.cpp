// Prints the limits of this machine, one "name value unit" a line: medians over rounds, a process a core.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "floor.hpp"

using floor_::Arena;
using floor_::now;
using floor_::Rank;

namespace {

constexpr int64_t kBig = 64 << 20;  // larger than the caches
constexpr int kRounds = 15;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void pin(int index) {
  cpu_set_t all, one;
  sched_getaffinity(0, sizeof(all), &all);
  CPU_ZERO(&one);
  for (int core = 0, seen = 0; core < CPU_SETSIZE; core++) {
    if (CPU_ISSET(core, &all) && seen++ == index % CPU_COUNT(&all)) CPU_SET(core, &one);
  }
  sched_setaffinity(0, sizeof(one), &one);
}

template <class T>
T* shared(size_t bytes) {
  return static_cast<T*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
}

std::vector<float> filled(float value) { return std::vector<float>(kBig / 4, value); }

// On whole lines, as what goes past the caches must be. Lives as long as its process.
float* aligned(const std::vector<float>& values) {
  auto* memory = static_cast<float*>(std::aligned_alloc(4096, values.size() * sizeof(float)));
  std::copy(values.begin(), values.end(), memory);
  return memory;
}

// Run `work(rank)` on `ranks` processes at once, kRounds times; the median of the slowest rank's seconds.
double seconds(int ranks, const std::function<std::function<void()>(Rank&, int)>& prepare) {
  auto* arena = shared<Arena>(sizeof(Arena));
  auto* times = shared<double>(sizeof(double) * ranks * kRounds);
  for (int r = 0; r < ranks; r++) {
    if (fork() != 0) continue;
    pin(r);
    Rank rank(arena, r, ranks);
    const auto work = prepare(rank, r);
    work();
    for (int i = 0; i < kRounds; i++) {
      rank.flags();
      const int64_t start = now();
      work();
      times[i * ranks + r] = (now() - start) * 1e-9;
    }
    _exit(0);
  }
  while (wait(nullptr) > 0) {
  }
  std::vector<double> slowest;
  for (int i = 0; i < kRounds; i++) slowest.push_back(*std::max_element(times + i * ranks, times + (i + 1) * ranks));
  munmap(arena, sizeof(Arena));
  return median(slowest);
}

std::function<void()> copy(Rank&, int) {
  auto* from = new std::vector<float>(filled(1));
  auto* to = new std::vector<float>(filled(2));
  return [=] { memcpy(to->data(), from->data(), kBig); };
}

std::function<void()> copy_around(Rank&, int) {
  auto* from = new std::vector<float>(filled(1));
  auto* to = aligned(filled(2));
  return [=] { floor_::copy_past_cache(to, from->data(), kBig / 4); };
}

// What moving 64 MiB from one rank's tensor to the other's cannot do without: rank 0 reads them, rank 1 writes them.
std::function<void()> read_or_write(Rank&, int rank) {
  auto* memory = aligned(filled(1));
  if (rank == 1) {
    return [=] {
      const floor_::Line line{};
      for (int64_t i = 0; i < kBig / 4; i += floor_::Line::floats) floor_::put_past_cache(memory + i, line);
      _mm_sfence();
    };
  }
  return [=] {
    floor_::Line sum{};
    floor_::each_line_of_four_pages(kBig / 4, memory, [&, memory](int64_t i, auto unit) {
      if constexpr (sizeof(unit) == sizeof(sum)) sum.v += floor_::as<floor_::Line>(memory + i).v;
    });
    asm volatile("" : : "m"(sum) : "memory");
  };
}

std::function<void()> add(Rank&, int) {
  auto* a = new std::vector<float>(filled(1));
  auto* b = new std::vector<float>(filled(2));
  return [=] {
    float* out = a->data();
    const float* in = b->data();
    for (int64_t i = 0; i < kBig / 4; i++) out[i] += in[i];
    asm volatile("" : : "r"(out) : "memory");
  };
}

std::function<void()> round_trips(Rank& rank, int) {
  return [&rank] { for (int i = 0; i < 10000; i++) rank.flags(); };
}

std::function<void()> two_shot(Rank& rank, int) {
  auto* data = new std::vector<float>(filled(1));
  return [&rank, data] { rank.all_reduce(data->data(), kBig / 4); };
}

}  // namespace

int main() {
  const double gib = double(kBig) / (1 << 30);
  std::printf("copy_1_core %.2f GiB/s\n", gib / seconds(1, copy));
  std::printf("copy_2_cores %.2f GiB/s\n", 2 * gib / seconds(2, copy));
  std::printf("copy_around_2_cores %.2f GiB/s\n", 2 * gib / seconds(2, copy_around));
  std::printf("read_and_write_64_MiB %.3f ms\n", seconds(2, read_or_write) * 1e3);
  std::printf("sum_1_core %.2f GiB/s\n", gib / seconds(1, add));
  std::printf("sum_2_cores %.2f GiB/s\n", 2 * gib / seconds(2, add));
  std::printf("flags_round_trip %.4f us\n", seconds(2, round_trips) / 10000 * 1e6);
  std::printf("two_shot_64_MiB %.3f ms\n", seconds(2, two_shot) * 1e3);
}
