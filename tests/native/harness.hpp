// A tiny test framework: named tests, checks that report their place, and ranks as threads of this process.
//
// Ranks share one mapping of the arena, so the thread sanitizer sees all their accesses at one address.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/group.hpp"

namespace harness {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

#define TEST(function, title)                                          \
  static void function();                                              \
  static const harness::Registration registration_##function(title, function); \
  static void function()

// `count` elements, the first `period` made one by one and the others copied: the sanitizer checks each access of a
// loop, but memcpy as a whole. A misplaced piece is noticed unless it is off by a multiple of the period; pieces are
// cut at powers of two.
constexpr size_t kPeriod = 251 * 256;
template <class T, class Element>
std::vector<T> periodic(size_t count, const Element& element) {
  std::vector<T> found(count);
  size_t filled = std::min(count, kPeriod);
  for (size_t i = 0; i < filled; ++i) found[i] = static_cast<T>(element(i));
  while (filled < count) {
    const size_t more = std::min(filled, count - filled);
    std::memcpy(found.data() + filled, found.data(), more * sizeof(T));
    filled += more;
  }
  return found;
}

[[noreturn]] inline void failed(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

#define CHECK(condition, details)                                                  \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::ostringstream harness_text;                                             \
      harness_text << #condition << "  " << details;                               \
      harness::failed(__FILE__, __LINE__, harness_text.str());                     \
    }                                                                              \
  } while (false)

// Small slots, so that even small arrays take every path.
inline opensmd::ArenaShape small_shape(int size) {
  opensmd::ArenaShape shape;
  shape.size = size;
  shape.staging_bytes = 12288;
  shape.chunk_bytes = 16384;
  shape.zero_copy_bytes = 512;
  shape.ring_bytes = 8192;
  shape.long_ring_bytes = 40960;
  shape.heap_bytes = 4u << 20;
  return shape;
}

// What each rank of such a group has: its Group, or what that is made of.
template <class Member>
using Rank = std::function<void(Member&)>;

template <class Member = opensmd::Group>
void run_ranks(const opensmd::ArenaShape& shape, const std::type_identity_t<Rank<Member>>& rank,
               std::chrono::milliseconds timeout = std::chrono::milliseconds{200000}) {
  const opensmd::ArenaFile file = opensmd::create_arena_file(shape);
  struct stat info;
  CHECK(fstat(file.fd, &info) == 0, "");
  const size_t bytes = static_cast<size_t>(info.st_size);
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  CHECK(mapping != MAP_FAILED, "");
  {
    std::vector<std::unique_ptr<Member>> groups;
    for (int i = 0; i < shape.size; ++i) {
      opensmd::GroupConfig config;
      config.rank = i;
      config.size = shape.size;
      config.fd = file.fd;
      config.timeout = timeout;
      config.shared_mapping = mapping;
      // On any machine, odd numbers of ranks sum along a chain.
      config.cores = shape.size % 2 == 0 ? shape.size : 2;
      groups.push_back(std::make_unique<Member>(config));
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < shape.size; ++i) {
      threads.emplace_back([&, i] {
        try {
          rank(*groups[static_cast<size_t>(i)]);
        } catch (const std::exception& error) {
          failed(__FILE__, __LINE__, "rank " + std::to_string(i) + " threw: " + error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  munmap(mapping, bytes);
  close(file.fd);
}

inline int run_all(int argc, char** argv) {
  for (const Test& test : tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    test.body();
    std::printf("ok  %s\n", test.name);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace harness
