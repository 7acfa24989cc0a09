// The timeline's events: added by many threads, and none lost silently.
#include <fcntl.h>

#include <atomic>

#include "core/timeline/event_log.hpp"
#include "harness.hpp"

using namespace opensmd;

namespace {

Event numbered(uint64_t number) {
  Event event;
  event.start_ns = number;
  return event;
}

TEST(order, "events of one thread come out as they went in, past the end of the ring too") {
  EventRing ring(8);
  for (uint64_t round = 0; round < 5; ++round) {
    for (uint64_t i = 0; i < 5; ++i) ring.add(numbered(round * 5 + i));
    const auto events = ring.take();
    CHECK(events.size() == 5, "round " << round);
    for (uint64_t i = 0; i < events.size(); ++i) CHECK(events[i].start_ns == round * 5 + i, "round " << round);
  }
  CHECK(ring.take().empty() && ring.take_lost().count == 0, "");
}

TEST(full, "a full ring keeps what it has, and counts what came too late") {
  EventRing ring(4);
  for (uint64_t i = 1; i <= 7; ++i) ring.add(numbered(i));
  const auto events = ring.take();
  CHECK(events.size() == 4 && events.back().start_ns == 4, "");
  const auto lost = ring.take_lost();
  CHECK(lost.count == 3 && lost.first_ns == 5, lost.count << " from " << lost.first_ns);
  CHECK(ring.take_lost().count == 0, "it is told once");
  ring.add(numbered(8));
  CHECK(ring.take().front().start_ns == 8, "");
}

TEST(half, "somebody is called once when half of the ring is taken") {
  EventRing ring(8);
  int called = 0;
  for (uint64_t i = 0; i < 8; ++i) called += ring.add(numbered(i)) ? 1 : 0;
  CHECK(called == 1, called);
}

TEST(threads, "of what many threads add while another takes, all comes out once or is counted") {
  constexpr uint64_t kEach = 20000;
  constexpr uint64_t kThreads = 3;
  EventRing ring(256);
  std::vector<int> seen(kThreads * kEach, 0);
  std::atomic<uint64_t> working{kThreads};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&ring, &working, t] {
      for (uint64_t i = 0; i < kEach; ++i) ring.add(numbered(t * kEach + i));
      --working;
    });
  }
  uint64_t taken = 0;
  uint64_t lost = 0;
  for (bool last = false; !last;) {
    last = working == 0;
    for (const Event& event : ring.take()) {
      ++seen[event.start_ns];
      ++taken;
    }
    lost += ring.take_lost().count;
  }
  for (auto& thread : threads) thread.join();
  CHECK(taken + lost == kThreads * kEach, taken << " taken, " << lost << " lost");
  CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times <= 1; }), "");
}

TEST(groups, "collectives of a group are noted with its number, and messages with the other member") {
  EventLog& log = EventLog::of_process();
  int ends[2];
  CHECK(pipe2(ends, O_NONBLOCK) == 0, "");
  log.start(ends[1]);
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    group.barrier();  // not registered
    group.record_as(static_cast<uint32_t>(group.rank()) + 1);
    float value = 1;
    group.all_reduce(&value, 1, DType::F32, Reduction::Sum);
    const auto request = group.rank() == 0 ? group.post_send(&value, 4, 1, 7) : group.post_receive(&value, 4, kAnySource, 7);
    request->wait();
  });
  log.stop();
  int collectives = 0;
  for (const Event& event : log.ring().take()) {
    CHECK(event.start_ns > 0 && event.end_ns >= event.start_ns && event.bytes == 4, "");
    if (event.operation == static_cast<uint32_t>(Operation::AllReduce)) {
      ++collectives;
      CHECK(event.sequence == 2, "the barrier was the first");
    } else {
      const bool sends = event.operation == static_cast<uint32_t>(Operation::Send);
      CHECK(event.group == (sends ? 1 : 2) && event.peer == (sends ? 1 : 0), "");
    }
  }
  CHECK(collectives == 2, collectives);
}

TEST(names, "operations have one number each, and groups of one name follow each other") {
  EventLog& log = EventLog::of_process();
  CHECK(log.operation("all_reduce") == static_cast<uint32_t>(Operation::AllReduce), "");
  const uint32_t number = log.operation("c10d::something_");
  CHECK(log.operation("c10d::something_") == number && log.operations()[number] == "c10d::something_", "");
  const uint32_t first = log.add_group("pair");
  CHECK(log.begin("pair", number, 1).sequence == 1 && log.begin("pair", number, 1).sequence == 2, "");
  CHECK(log.begin_message("pair", number, 1).group == first && log.begin("pair", number, 1).sequence == 3, "");
  const uint32_t second = log.add_group("pair");
  const Event event = log.begin("pair", number, 1);
  CHECK(second != first && event.group == second && event.sequence == 1, "");
  CHECK(log.begin("unknown", number, 1).group == 0, "");
}

}  // namespace

int main(int argc, char** argv) { return harness::run_all(argc, argv); }
