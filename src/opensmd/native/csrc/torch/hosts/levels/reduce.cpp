// Large: in parts up a tree of hosts, usually a chain, in which each host adds its own sum to what arrives: the busiest
// link carries the data once.
#include <cstring>
#include <memory>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {
namespace {

// Hosts along the way add up what arrives, unless that would round or overflow: then all send to the root.
bool on_the_way(const Signature& signature) { return TwoSums::serve(signature.dtype, signature.reduction); }

HostTree tree_of(const Signature& signature, int hosts, const Parts& parts) {
  return on_the_way(signature) ? HostTree::of(hosts, parts.count()) : HostTree{hosts - 1, 1};
}

void carry_reduce(Levels& on, const Calling& calling, const void* in, void* out, double factor) {
  const auto& [signature, call] = calling;
  const size_t count = signature.count, bytes = count * size_of(signature.dtype);
  const TwoSums sums(on.layout, signature.dtype, signature.reduction, factor);
  const int root_host = on.layout.host_of(signature.root), root_place = on.layout.place_of(signature.root);
  const int host = on.layout.host(), hosts = on.layout.hosts();
  const Route route = Route::to(root_host, hosts, on_the_way(signature) ? HostTree::fan_for(bytes) : hosts - 1);
  const int next = host == root_host ? host : route.parent(host);
  Agreement::Comparison comparison(on.agreement, signature, call, route);
  comparison.meet();
  void* own = comparison.first() ? comparison.payload_for(next) : nullptr;
  on.local.reduce(in, own, count, signature.dtype, sums.here, 0, sums.factor, call);
  // What came from this host's children in the tree, and its own sum.
  const auto add_up = [&](void* at) {
    std::vector<const void*> parts;
    for (int from = 0; from < hosts; ++from) {
      if (from == host) parts.push_back(own);
      if (route.leads(from, host)) parts.push_back(comparison.payload(from));
    }
    const Reducer& reducer = host == root_host ? sums.conclude : sums.combine;
    reducer(&at, 1, parts.data(), static_cast<int>(parts.size()), bytes);
  };
  if (host != root_host) {
    comparison.conclude_on_first();
    if (comparison.first() && bytes > 0 && route.leads_to(host)) add_up(own);
    std::vector<size_t> sizes(static_cast<size_t>(hosts), bytes);
    comparison.post(sizes);
    return comparison.finish();
  }
  if (root_place == 0) {
    comparison.conclude_on_first();
    if (out != nullptr && bytes > 0) add_up(out);
    return;
  }
  auto result = std::make_unique_for_overwrite<char[]>(bytes);
  comparison.conclude(result.get(), bytes, add_up);
  if (out != nullptr && bytes > 0) std::memcpy(out, result.get(), bytes);
}

class LargeReduce {
 public:
  LargeReduce(Levels& on, const Calling& calling, const void* in, void* out, double factor)
      : on_(on),
        calling_(calling),
        dtype_(calling.signature.dtype),
        sums_(on.layout, dtype_, calling.signature.reduction, factor),
        in_(static_cast<const char*>(in)),
        out_(static_cast<char*>(out)),
        parts_(Parts::along(on.layout.hosts(), calling.signature.count * size_of(dtype_))),
        tree_(tree_of(calling.signature, on.layout.hosts(), parts_)),
        root_host_(on.layout.host_of(calling.signature.root)),
        here_((on.layout.host() - root_host_ + on.layout.hosts()) % on.layout.hosts()),
        children_(tree_.children(here_, on.layout.hosts())),
        crosses_(on.layout.here()[static_cast<size_t>(on.layout.place())] == crosser(here_)),
        comparison_(on.agreement, calling.signature, calling.call,
                    on.framed ? Route::to(root_host_, on.layout.hosts(), tree_.fan) : Route()),
        crossing_(on.wire, calling.call, comparison_.digest()) {}

  void run() {
    slots_.resize(kAhead);
    for (auto& slot : slots_) {
      if (crosses_) slot.memory = std::make_unique_for_overwrite<char[]>(parts_.each * (children_.size() + 1));
    }
    for (size_t i = 0; i < std::min(kAhead, parts_.count()); ++i) expect(i);
    comparison_.meet();
    comparison_.post();
    if (parts_.count() > 0) add_up_here(0);
    comparison_.conclude();
    for (size_t i = 0; i < parts_.count(); ++i) {
      if (i > 0) add_up_here(i);
      if (crosses_) add_up_hosts(i);
      if (i + kAhead < parts_.count()) expect(i + kAhead);
    }
    crossing_.await_all_sent();
  }

 private:
  struct Slot {
    std::unique_ptr<char[]> memory;  // for this host's sum, and for its children's
    std::vector<size_t> receives;
    size_t send = 0;
    bool sent = false;
  };

  int crosser(int host) const {
    return on_.layout.partner((root_host_ + host) % on_.layout.hosts(), calling_.signature.root);
  }
  Slot& slot(size_t index) { return slots_[index % kAhead]; }
  char* sum(size_t index) { return here_ == 0 ? out_ + parts_.part(index).offset : slot(index).memory.get(); }
  char* from_child(size_t index, size_t child) { return slot(index).memory.get() + parts_.each * (child + 1); }

  void expect(size_t index) {
    if (!crosses_) return;
    slot(index).receives.clear();
    for (size_t child = 0; child < children_.size(); ++child) {
      slot(index).receives.push_back(
          crossing_.receive(from_child(index, child), parts_.part(index).bytes, crosser(children_[child])));
    }
  }

  void add_up_here(size_t index) {
    const auto [offset, bytes] = parts_.part(index);
    if (crosses_ && slot(index).sent) crossing_.await_sent(slot(index).send);
    on_.local.reduce(in_ + offset, crosses_ ? sum(index) : nullptr, bytes / size_of(dtype_), dtype_, sums_.here,
                     on_.layout.place_of(crosser(here_)), sums_.factor, calling_.call);
  }

  void add_up_hosts(size_t index) {
    const size_t bytes = parts_.part(index).bytes;
    void* into = sum(index);
    std::vector<const void*> hosts{into};
    for (size_t child = 0; child < children_.size(); ++child) {
      crossing_.await_received(slot(index).receives[child]);
      hosts.push_back(from_child(index, child));
    }
    const Reducer& reducer = here_ == 0 ? sums_.conclude : sums_.combine;
    if (!children_.empty()) reducer(&into, 1, hosts.data(), static_cast<int>(hosts.size()), bytes);
    if (here_ == 0) return;
    slot(index).send = crossing_.send(into, bytes, crosser(tree_.parent(here_)));
    slot(index).sent = true;
  }

  Levels& on_;
  const Calling& calling_;
  const DType dtype_;
  const TwoSums sums_;
  const char* const in_;
  char* const out_;
  const Parts parts_;
  const HostTree tree_;
  const int root_host_;
  const int here_;  // counted from the root's host
  const std::vector<int> children_;
  const bool crosses_;
  std::vector<Slot> slots_;
  Agreement::Comparison comparison_;
  Crossing crossing_;  // destroyed before the memory it writes to
};

}  // namespace

void reduce(Levels& on, const Calling& calling, const void* in, void* out, double factor) {
  if (on.carries_one_way(calling.signature.count * size_of(calling.signature.dtype))) {
    carry_reduce(on, calling, in, out, factor);
  } else {
    LargeReduce(on, calling, in, out, factor).run();
  }
}

}  // namespace opensmd::levels
