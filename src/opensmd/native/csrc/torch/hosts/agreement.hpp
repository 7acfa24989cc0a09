// In a group that spans hosts, members compare their calls before they accept data, as members of one host do in shared
// memory (core/protocol/round.hpp). On a mismatch Gloo itself gives wrong numbers, hangs or ends the process.
//
//      host A                         host B
//      rank 0  <── signatures ──>     rank 2        1. every host compares in shared memory
//      rank 1                         rank 3
//      rank 0  <════ frame ═════>     rank 2        2. their first members exchange what their hosts call,
//                                                      and with it the data of small calls
//      rank 0  ───── go on ────>      rank 2 ──>    3. they tell their hosts
//      rank 1                         rank 3
//
// A frame holds a digest of all calls so far. So where data flows one way only, frames do too, from host to host along
// a tree, and no host waits for more: hosts that exchange no frame in one call compare it in the next frame between
// them. Large data need not wait for the frames: its tags carry part of that digest (wire.hpp). Where every host needs
// data from all others, frames go around a ring: if calls differ anywhere, they differ between two neighbours. A member
// that finds a difference throws DifferentCalls; failure.hpp says how the others learn of it.
//
// Without shared memory, each member counts as a host here.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/protocol/record.hpp"
#include "torch/hosts/layout.hpp"
#include "torch/hosts/links.hpp"
#include "torch/hosts/local.hpp"

namespace opensmd {

// "all_reduce(sum, float32, count=4) shape [4]"
std::string describe(const Signature& signature, std::string_view text);

// The first limits what goes one way with a comparison, along a tree; more goes in parts, along a chain. The second
// limits what a host's frames take together where there are many hosts.
constexpr size_t kMostOneWay = 32u << 10;
constexpr size_t kMostToAll = 128u << 10;

class DifferentCalls : public Mismatch {
 public:
  using Mismatch::Mismatch;
};

// Which hosts send frames to which: all to all, each to the one behind it, or each to its children or its parent in a
// tree from `root`.
class Route {
 public:
  Route() = default;
  static Route round(int hosts) { return {Round, 0, hosts, 1}; }
  static Route from(int root, int hosts, int fan) { return {FromRoot, root, hosts, fan}; }
  static Route from(int root, int hosts) { return from(root, hosts, hosts - 1); }  // to each of the others directly
  static Route to(int root, int hosts, int fan) { return {ToRoot, root, hosts, fan}; }
  static Route to(int root, int hosts) { return to(root, hosts, hosts - 1); }

  bool leads(int from, int to) const {
    if (from == to) return false;
    if (way_ == Round) return (from + 1) % hosts_ == to;
    return way_ == Everyone || (way_ == FromRoot ? parent(to) == from : parent(from) == to);
  }
  // Whether any frame leads to a host, where there are several hosts.
  bool leads_to(int to) const {
    if (way_ == Everyone || way_ == Round) return true;
    return way_ == FromRoot ? to != root_ : tree_.fan * steps_to(to) + 1 < hosts_;
  }
  // In the tree; -1 for the root.
  int parent(int host) const {
    return host == root_ ? -1 : (root_ + tree_.parent(steps_to(host))) % hosts_;
  }
  // The host whose frame this one passes on; -1 if it passes nothing on.
  int source(int host) const { return way_ == FromRoot ? parent(host) : -1; }

 private:
  enum Way { Everyone, Round, FromRoot, ToRoot };

  Route(Way way, int root, int hosts, int fan) : way_(way), root_(root), hosts_(hosts), tree_{fan, 0} {}

  int steps_to(int host) const { return (host - root_ + hosts_) % hosts_; }

  Way way_ = Everyone;
  int root_ = -1;
  int hosts_ = 0;
  HostTree tree_{1, 0};
};

class Agreement {
 public:
  // `carried`: how much goes with the comparison where all send to all.
  Agreement(std::shared_ptr<Local> local, Wire& wire, const Layout& layout, size_t carried);

  // Throws DifferentCalls if another host has called something else, now or earlier. Returns only once all have called
  // it.
  void check(const Signature& signature, const Call& call);

  // Whether this many bytes from each host to each other are better sent with the comparison than beside it.
  bool carries(size_t bytes) const { return bytes <= carried_; }
  // Likewise where data goes one way, along a tree. Independent of the network, because a sum along a tree has
  // different bits.
  bool carries_one_way(size_t bytes) const { return bytes <= std::min(kMostOneWay, most_); }
  // Likewise where all send to all and just as many bytes cross beside the comparison, in more messages. Between two
  // hosts, both directions of one connection would get in each other's way.
  bool carries_pieces(size_t bytes) const { return carries(bytes) || (hosts_ > 2 && carries_one_way(bytes)); }

  class Comparison;

 private:
  const std::shared_ptr<Local> local_;
  const std::string name_;
  const int hosts_;
  const int host_;  // this member's
  const size_t carried_;
  const size_t most_;  // bytes in a frame
  std::optional<Links> links_;  // on first members
  uint64_t sequence_ = 0;       // of comparisons
  uint64_t digest_ = 0;         // of the calls compared
};

// The steps of one check, for callers that have work to do between them.
class Agreement::Comparison {
 public:
  static constexpr size_t kHeaderBytes = 128;

  // `detail` may differ between members; same_detail() says whether it does.
  Comparison(Agreement& owner, const Signature& signature, const Call& call, Route route = {}, uint64_t detail = 0);

  // Of all calls so far: equal on all members whose calls are equal.
  uint64_t digest() const { return owner_.digest_; }
  bool first() const { return owner_.links_.has_value(); }
  // On first members: where to write the payload for a host, at most as much as the agreement carries.
  std::byte* payload_for(int host);
  // 1. Compares the members of this host. Post receives of large data before it: the word that a receiver waits leaves
  // a host ahead of data that it would otherwise queue behind.
  void meet();
  // 2. On first members; does nothing on others. Sends each host this many bytes of its payload; none by default.
  void post(const std::vector<size_t>& bytes = {});
  // Likewise, but all hosts get the bytes written for this one.
  void post_to_all(size_t bytes);
  void conclude();  // 3.
  void conclude_on_first() { hear(); }  // likewise, if the others of this host need not wait for what it hears
  void finish();  // on first members that have posted after 3: waits until that has left
  // Like conclude(). All members of this host then have `bytes` at `data`, which fill(where) writes on the first one
  // from what has arrived; small data shares a round with what the first has heard. `keeps`: this member has the data
  // already, and its `data` may not be written to.
  template <typename Fill>
  void conclude(void* data, size_t bytes, Fill fill, bool keeps = false);
  bool same_detail() const { return same_detail_; }  // after 1, of this host; after 3, of all heard

  // On first members, after 3: what a host sent, or what was written for this one.
  const std::byte* payload(int host);
  // The data that goes from the root to all: what arrived or, on the root's host, what was written for this one.
  const std::byte* arrived() { return payload(route_.source(owner_.host_) < 0 ? owner_.host_ : route_.source(owner_.host_)); }

 private:
  struct Header {
    uint64_t sequence;
    uint64_t digest;
    uint64_t same_detail;
    uint64_t detail;
    Signature signature;  // for messages
  };

  const Header& header(int host);
  Header own_header() const;
  // Where to put what the first member has heard and this many bytes so that both go through one round; null if they
  // are too large.
  std::byte* together(size_t bytes);
  void hear();  // on first members, from the others
  void pass_on(size_t bytes);  // on first members: what the source has sent
  void tell_here(std::byte* together, size_t bytes);
  milliseconds time_left() const;
  Call later() const;
  [[noreturn]] void raise(int host);

  Agreement& owner_;
  const Signature& signature_;
  const Call& call_;
  const Route route_;
  const uint64_t detail_;
  const uint64_t start_ns_;
  bool same_detail_ = true;
  std::unique_ptr<std::byte[]> together_;
};

template <typename Fill>
void Agreement::Comparison::conclude(void* data, size_t bytes, Fill fill, bool keeps) {
  hear();
  pass_on(bytes);
  std::byte* joined = together(bytes);
  std::byte* at = joined ? joined + sizeof(uint64_t) : static_cast<std::byte*>(data);
  if (first() && bytes > 0 && !(keeps && at == data)) fill(at);
  tell_here(joined, bytes);
  if (bytes > 0 && !joined) {
    owner_.local_->broadcast(data, bytes, DType::U8, 0, later());
  } else if (bytes > 0 && !keeps) {
    std::memcpy(data, at, bytes);
  }
  finish();
}

}  // namespace opensmd
