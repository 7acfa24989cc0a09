// Point-to-point messages: order, matching, any size, any source, and no deadlock when all send first.
#include <ctime>
#include <random>

#include "core/memory/copy.hpp"
#include "harness.hpp"

using namespace opensmd;

namespace {

using Bytes = std::vector<unsigned char>;
using Requests = std::vector<std::shared_ptr<Request>>;

Bytes letter(size_t bytes, int from, int to, int64_t tag) {
  const auto envelope = static_cast<size_t>(from * 31 + to * 17 + tag * 13);
  return harness::periodic<unsigned char>(bytes, [envelope](size_t i) { return i * 7 + i / 251 + envelope; });
}

const std::vector<size_t> kSizes = {0, 1, 31, 32, 33, 64, 1000, 8192, 8193, 100000};

template <class Body>
void for_some_numbers_of_ranks(const Body& body) {
  for (const int n : {1, 2, 3}) harness::run_ranks(harness::small_shape(n), [&](Group& group) { body(group); });
}

TEST(every_size, "a message of every size arrives as it was sent, larger than the ring too") {
  for_some_numbers_of_ranks([](Group& group) {
    const int next = (group.rank() + 1) % group.size();
    const int previous = (group.rank() + group.size() - 1) % group.size();
    for (const size_t bytes : kSizes) {
      const Bytes sent = letter(bytes, group.rank(), next, 5);
      Bytes received(bytes);
      const auto receive = group.post_receive(received.data(), bytes, previous, 5);
      const auto send = group.post_send(sent.data(), bytes, next, 5);
      send->wait();
      receive->wait();
      CHECK(received == letter(bytes, previous, group.rank(), 5), "size " << bytes);
      CHECK(receive->source() == previous && receive->received_bytes() == bytes, "");
    }
  });
}

TEST(long_ring, "messages much larger than the caches arrive in order among small ones, in both directions at once") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const int peer = 1 - group.rank();
    const std::vector<size_t> sizes = {5, kPastCacheBytes, 70, kPastCacheBytes + 12345, kPastCacheBytes - 1};
    std::vector<Bytes> received;
    Requests requests;
    for (const size_t bytes : sizes) {
      received.emplace_back(bytes);
      requests.push_back(group.post_receive(received.back().data(), bytes, peer, 3));
    }
    std::vector<Bytes> sent;
    for (size_t i = 0; i < sizes.size(); ++i) {
      sent.push_back(letter(sizes[i], group.rank(), peer, static_cast<int64_t>(i)));
      requests.push_back(group.post_send(sent.back().data(), sizes[i], peer, 3));
    }
    for (const auto& request : requests) request->wait();
    for (size_t i = 0; i < sizes.size(); ++i) {
      CHECK(received[i] == letter(sizes[i], peer, group.rank(), static_cast<int64_t>(i)), "message " << i);
    }
  });
}

TEST(long_unexpected, "messages much larger than the caches wait for their receives, and a wrong size spoils nothing") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const int peer = 1 - group.rank();
    for (const int64_t tag : {1, 2, 3}) {
      const Bytes sent = letter(kPastCacheBytes + 1, group.rank(), peer, tag);
      group.post_send(sent.data(), sent.size(), peer, tag)->wait();
    }
    Bytes received(kPastCacheBytes + 1);
    for (const int64_t tag : {3, 2, 1}) {
      size_t bytes = 0;
      while (!group.ready(peer, tag, &bytes)) {
      }
      CHECK(bytes == received.size(), bytes);
      std::string message;
      try {
        group.post_receive(received.data(), tag == 2 ? 100 : received.size(), peer, tag)->wait();
      } catch (const Mismatch& error) {
        message = error.what();
      }
      CHECK(message.empty() == (tag != 2), message);
      CHECK(tag == 2 || received == letter(received.size(), peer, group.rank(), tag), "tag " << tag);
    }
  });
}

TEST(all_send_first, "ranks that all send to all before anybody receives do not wait for each other for ever") {
  for_some_numbers_of_ranks([](Group& group) {
    for (const size_t bytes : {size_t{100}, size_t{300000}}) {
      for (int to = 0; to < group.size(); ++to) {
        const Bytes sent = letter(bytes, group.rank(), to, 1);
        group.post_send(sent.data(), bytes, to, 1)->wait();
      }
      for (int from = 0; from < group.size(); ++from) {
        Bytes received(bytes);
        group.post_receive(received.data(), bytes, from, 1)->wait();
        CHECK(received == letter(bytes, from, group.rank(), 1), "from " << from);
      }
    }
  });
}

TEST(tags, "receives are matched by tag, and messages of one tag keep their order") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    constexpr int kMessages = 40;
    if (group.rank() == 0) {
      for (int i = 0; i < kMessages; ++i) {
        const Bytes sent = letter(kSizes[static_cast<size_t>(i) % kSizes.size()], 0, 1, i);
        group.post_send(sent.data(), sent.size(), 1, i % 3)->wait();
      }
      return;
    }
    for (int tag = 2; tag >= 0; --tag) {
      for (int i = tag; i < kMessages; i += 3) {
        Bytes received(kSizes[static_cast<size_t>(i) % kSizes.size()]);
        group.post_receive(received.data(), received.size(), 0, tag)->wait();
        CHECK(received == letter(received.size(), 0, 1, i), "message " << i);
      }
    }
  });
}

TEST(after_failure, "what a rank sent before it left can be read after the others have failed") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    Bytes received(100);
    if (group.rank() == 0) {
      for (const int64_t tag : {5, 7}) group.post_send(letter(100, 0, 1, tag).data(), 100, 1, tag)->wait();
      group.post_receive(received.data(), 100, 1, 9)->wait();
      group.leave();
      return;
    }
    const auto posted = group.post_receive(received.data(), 100, 0, 11);
    group.post_send(letter(100, 1, 0, 9).data(), 100, 0, 9)->wait();
    const auto failure = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    };
    const std::string lost = failure([&] { group.barrier(); });
    CHECK(lost.find("has left the group") != std::string::npos, lost);
    CHECK(group.wait_ready({{0, 8}, {0, 7}}) == 1, "wait_ready");
    for (const int64_t tag : {7, 5}) {
      CHECK(group.ready(0, tag), tag);
      group.post_receive(received.data(), 100, 0, tag)->wait();
      CHECK(received == letter(100, 0, 1, tag), tag);
      const std::string none = failure([&] { group.ready(0, tag); });
      CHECK(none.find("the group was aborted") != std::string::npos, none);
    }
  });
}

TEST(any_source, "a receive from any source says whom it heard") {
  harness::run_ranks(harness::small_shape(3), [](Group& group) {
    if (group.rank() != 0) {
      for (int i = 0; i < 20; ++i) {
        const Bytes sent = letter(500, group.rank(), 0, i);
        group.post_send(sent.data(), sent.size(), 0, 9)->wait();
      }
      return;
    }
    int heard[3] = {};
    for (int i = 0; i < 40; ++i) {
      Bytes received(500);
      const auto receive = group.post_receive(received.data(), received.size(), kAnySource, 9);
      receive->wait();
      const int from = receive->source();
      CHECK(received == letter(500, from, 0, heard[from]), "from " << from);
      ++heard[from];
    }
    CHECK(heard[1] == 20 && heard[2] == 20, "");
  });
}

TEST(background, "messages go on while nobody waits for them") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const int peer = 1 - group.rank();
    const Bytes sent = letter(1000000, group.rank(), peer, 0);
    Bytes received(sent.size());
    const auto receive = group.post_receive(received.data(), received.size(), peer, 0);
    const auto send = group.post_send(sent.data(), sent.size(), peer, 0);
    // The helper thread writes the end in the record's entry; no call is made into the group meanwhile.
    for (int i = 0; i < 400000 && group.message_record(group.rank())[0].end_ns == 0; ++i) usleep(500);
    CHECK(group.message_record(group.rank())[0].end_ns != 0, "the receive was not completed in the background");
    receive->wait();
    send->wait();
    CHECK(received == letter(1000000, peer, group.rank(), 0), "");
  });
}

TEST(idle_after_failure, "nothing goes on for messages of a group that has failed") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    if (group.rank() == 1) return;
    int value = 0;
    const auto never = group.post_receive(&value, sizeof(value), 1, 1);
    group.abort("");
    usleep(200000);  // meanwhile the helper thread goes to sleep
    const std::clock_t begin = std::clock();
    usleep(300000);
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    CHECK(seconds < 0.01, seconds << " s of a processor");
  });
}

TEST(probe, "ready tells of a message before it is received, and wait_any finds one that is done") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const Bytes first = letter(70, 0, 1, 1);
    const Bytes second = letter(9000, 0, 1, 2);
    if (group.rank() == 0) {
      const auto a = group.post_send(first.data(), first.size(), 1, 1);
      const auto b = group.post_send(second.data(), second.size(), 1, 2);
      a->wait();
      b->wait();
      group.barrier();
      return;
    }
    size_t bytes = 0;
    int from = -1;
    while (!group.ready(kAnySource, 2, &bytes, &from)) {
    }
    CHECK(bytes == second.size() && from == 0, "");
    CHECK(group.ready(0, 1), "");
    CHECK(!group.ready(0, 3), "");
    Bytes one(first.size());
    Bytes two(second.size());
    Bytes never(4);
    const Requests requests = {group.post_receive(never.data(), 4, 0, 77), group.post_receive(two.data(), two.size(), 0, 2)};
    CHECK(group.wait_any(requests) == 1, "");
    group.post_receive(one.data(), one.size(), 0, 1)->wait();
    CHECK(one == first && two == second, "");
    CHECK(!requests[0]->done(), "");
    group.barrier();
  });
}

TEST(wait_ready, "wait_ready sleeps until one of several messages has come, behind others too") {
  harness::run_ranks(harness::small_shape(3), [](Group& group) {
    if (group.rank() == 2) {
      usleep(5000);
      const Bytes other = letter(3000, 2, 0, 1);
      const Bytes wanted = letter(50, 2, 0, 2);
      group.post_send(other.data(), other.size(), 0, 1)->wait();
      group.post_send(wanted.data(), wanted.size(), 0, 2)->wait();
    }
    if (group.rank() == 0) {
      CHECK(group.wait_ready({{1, 2}, {2, 2}, {2, 9}}) == 1, "");
      Bytes received(50);
      group.post_receive(received.data(), 50, 2, 2)->wait();
      CHECK(received == letter(50, 2, 0, 2), "");
      received.resize(3000);
      CHECK(group.wait_ready({{kAnySource, 1}}) == 0, "");
      group.post_receive(received.data(), 3000, 2, 1)->wait();
      CHECK(received == letter(3000, 2, 0, 1), "");
    }
    group.barrier();
  });
}

TEST(wrong_size, "a receive of another size than the message fails, names both sizes, and spoils nothing") {
  harness::run_ranks(harness::small_shape(2), [](Group& group) {
    const Bytes sent = letter(64, 0, 1, 3);
    if (group.rank() == 0) {
      group.post_send(sent.data(), 64, 1, 3)->wait();
      group.post_send(sent.data(), 64, 1, 3)->wait();
      return;
    }
    Bytes received(64);
    std::string message;
    try {
      group.post_receive(received.data(), 16, 0, 3)->wait();
    } catch (const Mismatch& error) {
      message = error.what();
    }
    CHECK(message.find("64 bytes") != std::string::npos && message.find("16 bytes") != std::string::npos, message);
    group.post_receive(received.data(), 64, 0, 3)->wait();
    CHECK(received == sent, "");
  });
}

TEST(storm, "a storm of random messages in both directions, beside collectives, arrives complete") {
  harness::run_ranks(harness::small_shape(3), [](Group& group) {
    std::mt19937 random(3);  // the same on all ranks: each knows the whole plan
    struct Plan {
      int from, to;
      int64_t tag;
      size_t bytes;
    };
    std::vector<Plan> plans;
    for (int i = 0; i < 300; ++i) {
      plans.push_back({static_cast<int>(random() % 3), static_cast<int>(random() % 3), static_cast<int64_t>(random() % 4),
                       random() % (1u << random() % 16)});
    }
    std::thread collectives([&group] {
      for (int i = 0; i < 200; ++i) {
        int one = 1;
        group.all_reduce(&one, 1, DType::I32, Reduction::Sum);
        CHECK(one == 3, "");
      }
    });
    std::vector<Bytes> buffers;
    Requests requests;
    std::vector<size_t> receives;
    for (size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      if (plan.from == group.rank()) {
        buffers.push_back(letter(plan.bytes, plan.from, plan.to, static_cast<int64_t>(i)));
        requests.push_back(group.post_send(buffers.back().data(), plan.bytes, plan.to, plan.tag));
      }
    }
    std::vector<std::pair<size_t, Bytes>> received;
    received.reserve(plans.size());
    for (size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      if (plan.to != group.rank()) continue;
      received.emplace_back(i, Bytes(plan.bytes));
      requests.push_back(group.post_receive(received.back().second.data(), plan.bytes, plan.from, plan.tag));
      if (random() % 3 == 0) requests.back()->wait();
    }
    for (const auto& request : requests) request->wait();
    for (const auto& [i, bytes] : received) {
      CHECK(bytes == letter(plans[i].bytes, plans[i].from, plans[i].to, static_cast<int64_t>(i)), "message " << i);
    }
    collectives.join();
  });
}

}  // namespace

int main(int argc, char** argv) { return harness::run_all(argc, argv); }
