// The pure parts of groups that span hosts: which ranks communicate, and in which parts. And when a waiting rank
// yields.
#include "harness.hpp"

#include "core/protocol/yielding.hpp"
#include "torch/hosts/layout.hpp"
#include "torch/hosts/levels/parts.hpp"

using namespace opensmd;

TEST(partners, "every member of another host has one partner, and the work is spread over places") {
  const Layout layout({{0, 3, 4}, {1, 2}, {5}}, 3);
  CHECK(layout.host() == 0 && layout.place() == 1 && layout.size() == 6, layout.host());
  CHECK(layout.partner(0, 1) == 0 && layout.partner(0, 2) == 3 && layout.partner(0, 5) == 0, layout.partner(0, 2));
  CHECK(layout.partner(1, 4) == 1 && layout.partner(2, 4) == 5, layout.partner(1, 4));
  CHECK(layout.most_on_a_host() == 3 && layout.fewest_on_a_host() == 1, layout.most_on_a_host());
  const Layout apart = layout.apart();
  CHECK(apart.hosts() == 6 && apart.host() == 3 && apart.members(5) == std::vector<int>{5}, apart.hosts());
}

TEST(trees, "every host but the root's is the child of exactly one, in a chain and in a tree") {
  for (const int hosts : {1, 2, 4, 5, 64, 1000}) {
    for (const HostTree tree : {HostTree{1, hosts - 1}, HostTree{2, 0}}) {
      std::vector<int> parents(static_cast<size_t>(hosts), -1);
      for (int host = 0; host < hosts; ++host) {
        for (int child : tree.children(host, hosts)) {
          CHECK(parents[static_cast<size_t>(child)] == -1 && tree.parent(child) == host, child);
          parents[static_cast<size_t>(child)] = host;
        }
      }
      for (int host = 1; host < hosts; ++host) CHECK(parents[static_cast<size_t>(host)] >= 0, host);
    }
  }
}

TEST(shapes, "few hosts are a chain, many a tree, and the choice is the one of fewer steps") {
  CHECK(HostTree::of(2, 64).fan == 1 && HostTree::of(4, 64).fan == 1 && HostTree::of(4, 64).steps(64) == 66, "");
  CHECK(HostTree::of(1000, 64).fan == 2 && HostTree::of(1000, 64).steps(64) < 160, HostTree::of(1000, 64).steps(64));
  CHECK(HostTree::of(1, 64).children(0, 1).empty(), "");
}

TEST(parts, "parts follow one another without gaps, and there are enough of them where they are not small") {
  for (const size_t bytes : {size_t{0}, size_t{4}, size_t{100000}, size_t{4} << 20, (size_t{64} << 20) + 12}) {
    const auto parts = levels::Parts::of(bytes, size_t{1} << 20, 64);
    size_t end = 0;
    for (size_t i = 0; i < parts.count(); ++i) {
      CHECK(parts.part(i).offset == end && parts.part(i).bytes > 0, i);
      end += parts.part(i).bytes;
    }
    CHECK(end == bytes, end);
    CHECK(bytes < (size_t{4} << 20) || parts.count() >= 64, parts.count());
  }
}

TEST(crowding, "a thread whose turn to yield lasted a time slice sleeps at once for much longer, but not for ever") {
  Crowding crowding;
  constexpr uint64_t kMicrosecond = 1000, kMillisecond = 1000 * 1000, kSecond = 1000 * kMillisecond;
  uint64_t now = 7 * kSecond;
  CHECK(!crowding.lasts(now), now);
  crowding.note_turn(now, now + 30 * kMicrosecond);  // a peer had something to do here
  CHECK(!crowding.lasts(now + 30 * kMicrosecond), "");
  crowding.note_turn(now, now + 3 * kMillisecond);
  now += 3 * kMillisecond;
  CHECK(crowding.lasts(now) && crowding.lasts(now + 100 * kMillisecond), "");
  crowding.note_turn(now, now + 30 * kMicrosecond);  // which does not end the crowding
  CHECK(crowding.lasts(now + 100 * kMillisecond) && !crowding.lasts(now + kSecond), "");
  crowding.note_turn(now, now + 3600 * kSecond);  // the process was stopped
  CHECK(!crowding.lasts(now + 3601 * kSecond), "");
}

int main(int argc, char** argv) { return harness::run_all(argc, argv); }
