// What a member chooses for itself: how and how long it waits, and what messages call the others.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace opensmd {

using std::chrono::milliseconds;

struct Waiting {
  int spin_microseconds = -1;  // -1: 2 with a core for each member, else 0
  int yields = 200;            // sched_yield calls before sleeping in the kernel, if a millisecond has room for them
};

struct GroupConfig {
  int rank = 0;
  int size = 1;
  int fd = -1;                             // of the arena's file; not closed by the group
  std::vector<std::string> names;          // how messages call member i, e.g. "rank 3"; default "rank i"
  milliseconds timeout{30 * 60 * 1000};    // for calls that give none
  Waiting waiting;
  int cores = 0;                           // that the members may use at once; 0: all of this machine
  // `alone`: whether the calling thread is the only one in its process that could make calls; asked only in a long
  // wait. Then: where warnings for the user go.
  std::function<bool()> alone = [] { return false; };
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  void* shared_mapping = nullptr;          // tests with ranks as threads: an existing mapping of the whole file
};

// What may accompany each call.
struct Call {
  std::string_view text = {};  // up to 63 characters for messages, e.g. "shape [2, 3]"
  milliseconds timeout{0};     // 0: the group's. Counts from the call's start
};

}  // namespace opensmd
