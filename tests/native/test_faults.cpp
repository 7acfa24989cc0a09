// Death, stops, mismatches and departures: every rank raises promptly, and says who and what.
#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>

#include "processes.hpp"

using namespace opensmd;
using harness::Outcome;
using harness::Processes;

namespace {

constexpr auto kLong = std::chrono::milliseconds{2400000};  // a wait this long fails its test
constexpr auto kShort = std::chrono::milliseconds{300};

void sum(Group& group, size_t count) {
  std::vector<float> data(count, 1.0f);
  group.all_reduce(data.data(), count, DType::F32, Reduction::Sum);
  CHECK(data[0] == static_cast<float>(group.size()), data[0]);
}

void contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) CHECK(text.find(part) != std::string::npos, "no '" << part << "' in: " << text);
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

size_t address_space() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

TEST(killed_before, "a rank killed before a collective is named on all others, which fail at once afterwards") {
  Processes ranks(3, kLong, [](Group& group, Outcome& outcome) {
    sum(group, 10);
    outcome.stage = 1;
    if (group.rank() == 1) pause();
    std::string first;
    try {
      sum(group, 1000);
    } catch (const CollectiveError& error) {  // the last to arrive finds the group aborted
      first = error.what();
    }
    contains(first, {"all_reduce(sum, float32, count=1000) #2", "rank 1", "died"});
    CHECK(group.aborted(), "");
    group.barrier();
  });
  for (int i = 0; i < 3; ++i) ranks.wait_for_stage(i, 1);
  ranks.signal(1, SIGKILL);
  for (const int i : {0, 2}) contains(ranks.message(i), {"Aborted", "barrier", "first cause", "rank 1", "died"});
}

TEST(another_program, "a rank that becomes another program is named on all others, though its process lives") {
  Processes ranks(2, kLong, [](Group& group, Outcome&) {
    sum(group, 10);
    if (group.rank() == 1) execlp("sleep", "sleep", "2400", nullptr);
    sum(group, 1000);
  });
  contains(ranks.message(0), {"PeerLost", "#2 on rank 0", "rank 1 has died", "has become another program"});
}

TEST(killed_inside, "a rank killed inside a collective, while another has not come yet, is noticed by those who wait") {
  Processes ranks(3, kLong, [](Group& group, Outcome& outcome) {
    sum(group, 10);
    if (group.rank() == 2) pause();
    while (group.rank() == 0 && group.status(1).entered < 2) usleep(100);
    outcome.stage = 1;
    sum(group, 100000);
  });
  ranks.wait_for_stage(0, 1);
  ranks.signal(1, SIGKILL);
  contains(ranks.message(0), {"PeerLost", "all_reduce", "#2 on rank 0", "rank 1 has died", "it is in all_reduce"});
}

TEST(yielding, "whoever yields looks after the others too, however many yields it was given") {
  const Waiting waiting{0, 2000000000};
  for (const bool message : {false, true}) {
    Processes ranks(2, kLong, [message](Group& group, Outcome& outcome) {
      sum(group, 10);
      outcome.stage = 1;
      if (group.rank() == 1) pause();
      int value = 0;
      if (message) group.post_receive(&value, 4, 1, 1)->wait();
      sum(group, 10);
    }, Processes::kNobody, waiting);
    for (int i = 0; i < 2; ++i) ranks.wait_for_stage(i, 1);
    ranks.signal(1, SIGKILL);
    contains(ranks.message(0), {"PeerLost", message ? "recv(from rank 1" : "all_reduce", "rank 1 has died"});
  }
}

TEST(stopped, "a timeout names the rank whose process is stopped and where it was last") {
  Processes ranks(3, kShort, [](Group& group, Outcome& outcome) {
    group.barrier({{}, kLong});
    outcome.stage = 1;
    if (group.rank() == 1) pause();
    while (group.status(1).state != MemberState::Stopped) usleep(100);
    sum(group, 5);
  });
  ranks.wait_for_stage(1, 1);
  ranks.signal(1, SIGSTOP);
  std::string both = ranks.message(0) + ranks.message(2);
  contains(both, {"TimedOut", "Timed out after 300 ms", "not arrived: rank 1", "stopped", "its last call was barrier() #1"});
  CHECK(both.find("PeerLost") == std::string::npos, both);
}

TEST(never_joined, "a timeout names the rank that never joined the group") {
  Processes ranks(3, kShort, [](Group& group, Outcome&) { group.barrier(); }, 2);
  for (const int i : {0, 1}) contains(ranks.message(i), {"rank 2", "has not joined the group"});
  contains(ranks.message(0) + ranks.message(1), {"TimedOut"});  // the other one may find the group aborted
}

TEST(mismatches, "different operations, sizes, dtypes, reductions or roots raise on all ranks and show each call") {
  using Calls = std::pair<Processes::Body, Processes::Body>;
  static float data[100];
  const auto all_reduce = [](size_t count, DType dtype, Reduction reduction) {
    return [=](Group& group, Outcome&) { group.all_reduce(data, count, dtype, reduction, 1.0, {"mine"}); };
  };
  const auto broadcast = [](int root) {
    return [=](Group& group, Outcome&) { group.broadcast(data, 4, DType::F32, root); };
  };
  const std::vector<std::pair<Calls, std::vector<const char*>>> cases = {
      {{all_reduce(4, DType::F32, Reduction::Sum), [](Group& group, Outcome&) { group.barrier(); }},
       {"rank 0 and rank 2 called all_reduce(sum, float32, count=4) mine", "rank 1 called barrier()"}},
      {{all_reduce(4, DType::F32, Reduction::Sum), all_reduce(5, DType::F32, Reduction::Sum)}, {"count=4", "count=5"}},
      {{all_reduce(4, DType::F32, Reduction::Sum), all_reduce(4, DType::I32, Reduction::Sum)}, {"float32", "int32"}},
      {{all_reduce(4, DType::F32, Reduction::Sum), all_reduce(4, DType::F32, Reduction::Max)}, {"sum", "max"}},
      {{broadcast(0), broadcast(1)}, {"root=rank 0", "root=rank 1"}},
  };
  for (const auto& [calls, parts] : cases) {
    Processes ranks(3, kLong, [&calls = calls](Group& group, Outcome& outcome) {
      (group.rank() == 1 ? calls.second : calls.first)(group, outcome);
    });
    for (int i = 0; i < 3; ++i) {
      contains(ranks.message(i), {"Mismatch", "sequence number 1"});
      for (const char* part : parts) contains(ranks.message(i), {part});
    }
  }
}

TEST(uneven_splits, "all_to_all splits that do not agree raise on all ranks and name the pair") {
  Processes ranks(3, kLong, [](Group& group, Outcome&) {
    std::vector<int> in(30);
    std::vector<int> out(30);
    std::vector<size_t> in_counts = {2, 2, 2};
    std::vector<size_t> out_counts = {2, 2, 2};
    if (group.rank() == 2) out_counts[0] = 3;
    std::vector<const void*> ins(3, in.data());
    std::vector<void*> outs = {out.data(), out.data() + 10, out.data() + 20};
    group.all_to_all(ins.data(), in_counts.data(), outs.data(), out_counts.data(), DType::I32);
  });
  for (int i = 0; i < 3; ++i) {
    contains(ranks.message(i), {"Mismatch", "rank 0 sends 2 elements to rank 2, which expects 3"});
  }
}

TEST(left, "a rank that left properly is named as having left when others still need it") {
  Processes ranks(2, kLong, [](Group& group, Outcome&) {
    group.barrier();
    if (group.rank() == 1) return;
    group.barrier();
  });
  contains(ranks.message(0), {"PeerLost", "barrier() #2 on rank 0", "rank 1 has left the group"});
}

TEST(early_exit, "a root that leaves right after its broadcast does not disturb those who still read") {
  for (int round = 0; round < 20; ++round) {
    Processes ranks(3, kLong, [](Group& group, Outcome&) {
      std::vector<int> data(40000, group.rank() == 0 ? 42 : 0);
      if (group.rank() == 2) usleep(2000);
      group.broadcast(data.data(), data.size(), DType::I32, 0);
      CHECK(data[39999] == 42, data[39999]);
      const float last = 1.0f;
      std::vector<void*> outs(3, data.data());
      group.gather(&last, outs.data(), 1, DType::F32, 1);
    });
    for (int i = 0; i < 3; ++i) CHECK(ranks.message(i) == ": ", ranks.message(i));
  }
}

TEST(forked, "a forked child is told that the group is its parent's, and its exit disturbs nobody") {
  Processes ranks(2, kLong, [](Group& group, Outcome&) {
    group.barrier();
    int pipes[2];
    CHECK(pipe(pipes) == 0, "");
    if (group.rank() == 0) {
      const pid_t child = fork();
      if (child == 0) {
        std::string message = "none";
        try {
          group.barrier();
        } catch (const CollectiveError& error) {
          message = error.what();
        }
        CHECK(write(pipes[1], message.data(), message.size()) > 0, "");
        group.~Group();
        _exit(0);
      }
      char text[500] = "";
      CHECK(read(pipes[0], text, sizeof(text) - 1) > 0, "");
      contains(text, {"forked child", "spawn"});
      waitpid(child, nullptr, 0);
    }
    sum(group, 10);
  });
  for (int i = 0; i < 2; ++i) CHECK(ranks.message(i) == ": ", ranks.message(i));
}

TEST(aborted, "abort ends the calls under way on all ranks, with the reason") {
  Processes ranks(3, kLong, [](Group& group, Outcome&) {
    if (group.rank() == 1) {
      usleep(10000);
      group.abort("the user pressed a button");
    }
    group.barrier();
  });
  for (int i = 0; i < 3; ++i) contains(ranks.message(i), {"Aborted", "barrier", "the user pressed a button"});
}

TEST(message_of_the_dead, "what a rank sent before it was killed still arrives; the next receive names the dead") {
  Processes ranks(2, kLong, [](Group& group, Outcome& outcome) {
    int value = 7;
    if (group.rank() == 1) {
      group.post_send(&value, 4, 0, 1)->wait();
      outcome.stage = 1;
      pause();
    }
    while (!group.ready(1, 1)) usleep(100);
    outcome.stage = 1;
    while (group.status(1).state != MemberState::Dead) usleep(100);
    value = 0;
    group.post_receive(&value, 4, 1, 1)->wait();
    CHECK(value == 7, value);
    group.post_receive(&value, 4, 1, 1)->wait();
  });
  for (int i = 0; i < 2; ++i) ranks.wait_for_stage(i, 1);
  ranks.signal(1, SIGKILL);
  contains(ranks.message(0), {"PeerLost", "recv(from rank 1, tag=1, bytes=4) on rank 0", "rank 1 has died"});
}

// Rank 1 is stopped with part of its message sent, which rank 0 has received.
using After = std::function<void(std::vector<char>&, Outcome&)>;
Processes stopped_in_a_message(std::chrono::milliseconds timeout, const After& after) {
  return Processes(2, kLong, [timeout, after](Group& group, Outcome& outcome) {
    std::vector<char> data(size_t{32} << 20, 'a');
    if (group.rank() == 1) {
      const auto send = group.post_send(data.data(), data.size(), 0, 1);
      outcome.stage = 1;
      send->wait();
      return;
    }
    while (group.status(1).state != MemberState::Stopped) usleep(100);
    std::fill(data.begin(), data.end(), 'b');
    const auto receive = group.post_receive(data.data(), data.size(), 1, 1);
    CHECK(data.front() == 'a' && data.back() == 'b', "not in the middle of the message");
    outcome.stage = 1;
    try {
      receive->wait(timeout);
    } catch (...) {
      after(data, outcome);
      throw;
    }
  });
}

TEST(killed_in_a_message, "a rank killed in the middle of a large message is named") {
  Processes ranks = stopped_in_a_message(kLong, [](std::vector<char>&, Outcome&) {});
  ranks.wait_for_stage(1, 1);
  ranks.signal(1, SIGSTOP);
  ranks.wait_for_stage(0, 1);
  ranks.signal(1, SIGKILL);
  contains(ranks.message(0), {"PeerLost", "recv(from rank 1, tag=1, bytes=33554432) on rank 0", "rank 1 has died"});
}

TEST(given_up, "memory of a message that was given up is left alone, even if its sender goes on") {
  Processes ranks = stopped_in_a_message(kShort, [](std::vector<char>& data, Outcome& outcome) {
    std::fill(data.begin(), data.end(), 'c');
    outcome.stage = 2;
    while (outcome.stage.load() < 3) usleep(1000);
    CHECK(std::count(data.begin(), data.end(), 'c') == static_cast<long>(data.size()), "it was written to");
  });
  ranks.wait_for_stage(1, 1);
  ranks.signal(1, SIGSTOP);
  ranks.wait_for_stage(0, 2);
  ranks.signal(1, SIGCONT);
  contains(ranks.message(1), {"TimedOut", "send(to rank 0"});
  ranks.of(0).stage = 3;
  contains(ranks.message(0), {"TimedOut", "recv(from rank 1", "Timed out after", "stopped"});
}

TEST(message_timeout, "a receive that nothing matches times out and says from whom") {
  Processes ranks(2, kLong, [](Group& group, Outcome&) {
    int value = 7;
    if (group.rank() == 1) group.post_send(&value, 4, 0, 2)->wait();
    const auto receive = group.post_receive(&value, 4, 1 - group.rank(), 1);
    group.barrier();
    receive->wait(kShort);
  });
  // The first to time out says so; the other gives up with the same words.
  for (int i = 0; i < 2; ++i) {
    contains(ranks.message(i), {"TimedOut", "tag=1", "Timed out after ", "has sent nothing that matches: rank"});
  }
}

TEST(same_member, "two processes that join as the same member are told") {
  const ArenaFile file = create_arena_file(harness::small_shape(2));
  GroupConfig config;
  config.size = 2;
  config.fd = file.fd;
  Group first(config);
  std::string message;
  try {
    Group second(config);
  } catch (const CollectiveError& error) {
    message = error.what();
  }
  contains(message, {"two processes joined"});
  close(file.fd);
}

TEST(same_member_again, "who joins as a member that is there already does not make the others take it for dead") {
  const ArenaFile file = create_arena_file(harness::small_shape(2));
  GroupConfig config;
  config.size = 2;
  config.fd = file.fd;
  const Group first(config);
  const pid_t child = fork();
  if (child == 0) {
    try {
      Group second(config);
    } catch (const CollectiveError& error) {
      contains(error.what(), {("the other one is process " + std::to_string(getppid())).c_str()});
      _exit(0);
    }
    _exit(1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0, status);
  config.rank = 1;
  const Group other(config);
  CHECK(other.status(0).state == MemberState::Running, static_cast<int>(other.status(0).state));
  close(file.fd);
}

TEST(no_memory, "a message that is in the way of another, and for which there is no memory, ends the group") {
  Processes ranks(2, kLong, [](Group& group, Outcome&) {
    std::vector<std::byte> data(size_t{8} << 20);
    if (group.rank() == 0) {
      group.post_send(data.data(), data.size(), 1, 1);
      group.post_send(data.data(), 4, 1, 2);
      group.barrier();
    }
    while (!group.ready(0, 1)) usleep(100);
    rlimit limit = {address_space() + (1u << 20), RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0, "");
    group.post_receive(data.data(), 4, 0, 2)->wait();
  });
  for (int i = 0; i < 2; ++i) contains(ranks.message(i), {"rank 1 has no memory", "8388608 bytes from rank 0, tag=1"});
}

TEST(wrong_file, "a file that is not the group's arena is refused") {
  const ArenaFile file = create_arena_file(harness::small_shape(2), ArenaPlace::DevShm);
  std::string message;
  try {
    open_arena_file(file.path, file.token + 1);
  } catch (const CollectiveError& error) {
    message = error.what();
  }
  contains(message, {file.path.c_str(), "is not the shared memory"});
  const int fd = open_arena_file(file.path, file.token);
  unlink_arena_file(file);
  CHECK(access(file.path.c_str(), F_OK) != 0, "");
  close(fd);
  close(file.fd);
}

TEST(failed_to_join, "a process that cannot join a group keeps nothing of it open") {
  const ArenaFile file = create_arena_file(harness::small_shape(1));
  struct stat size;
  fstat(file.fd, &size);
  void* const mapping = mmap(nullptr, static_cast<size_t>(size.st_size), PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_NORESERVE, file.fd, 0);
  GroupConfig no_pages;  // a descriptor that reserves none
  no_pages.fd = open(file.path.c_str(), O_RDONLY);
  no_pages.shared_mapping = mapping;
  GroupConfig not_writable;
  not_writable.fd = no_pages.fd;
  GroupConfig foreign;
  foreign.fd = static_cast<int>(memfd_create("foreign", 0));
  CHECK(ftruncate(foreign.fd, 4096) == 0, "");
  const int before = open_descriptors();
  for (const auto& [config, words] : {std::pair<GroupConfig, const char*>{no_pages, "cannot reserve"},
                                      {not_writable, "cannot map"},
                                      {foreign, "is not the shared memory"}}) {
    std::string message;
    try {
      Group group(config);
    } catch (const CollectiveError& error) {
      message = error.what();
    }
    contains(message, {words});
    CHECK(open_descriptors() == before, words);
  }
  munmap(mapping, static_cast<size_t>(size.st_size));
  for (const int fd : {foreign.fd, no_pages.fd, file.fd}) close(fd);
}

TEST(bad_arguments, "arguments that make no sense raise and leave the group usable") {
  Processes ranks(2, kLong, [](Group& group, Outcome&) {
    float data[4] = {1, 1, 1, 1};
    int caught = 0;
    const auto refused = [&caught](const auto& call) {
      try {
        call();
      } catch (const std::invalid_argument&) {
        ++caught;
      }
    };
    refused([&] { group.all_reduce(data, 4, DType::F32, Reduction::BitAnd); });
    refused([&] { group.all_reduce(data, 4, DType::Bool, Reduction::Average); });
    refused([&] { group.broadcast(data, 4, DType::F32, 2); });
    refused([&] { group.post_send(data, 4, 5, 0); });
    refused([&] { group.heap_free(data); });
    CHECK(caught == 5, caught);
    sum(group, 4);
  });
  for (int i = 0; i < 2; ++i) CHECK(ranks.message(i) == ": ", ranks.message(i));
}

TEST(heap_reuse, "the heap gives freed memory again, keeps blocks apart, and says when it is full") {
  harness::run_ranks(harness::small_shape(1), [](Group& group) {
    char* a = static_cast<char*>(group.heap_allocate(100000));
    char* b = static_cast<char*>(group.heap_allocate(1));
    CHECK(b >= a + 100000 || b < a, "");
    CHECK(group.heap_contains(a) && !group.heap_contains(&group), "");
    group.heap_free(a);
    CHECK(group.heap_allocate(50000) == a, "");
    CHECK(group.heap_allocate(size_t{64} << 20) == nullptr, "");
    group.heap_free(nullptr);
  });
}

}  // namespace

int main(int argc, char** argv) { return harness::run_all(argc, argv); }
