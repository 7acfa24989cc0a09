// Large: in parts along a tree of hosts, usually a chain, so that the busiest link carries the data once. On each host
// one member receives, passes on, and shares in shared memory.
#include <cstring>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"

namespace opensmd::levels {
namespace {

void carry_broadcast(Levels& on, const Calling& calling, void* data) {
  const auto& [signature, call] = calling;
  const size_t bytes = signature.count * size_of(signature.dtype);
  const int root_host = on.layout.host_of(signature.root);
  const bool here = on.layout.host() == root_host;
  const int root_place = on.layout.place_of(signature.root);
  const bool before = here && root_place != 0;  // first to the first member of the root's host
  Agreement::Comparison comparison(on.agreement, signature, call,
                                   Route::from(root_host, on.layout.hosts(), HostTree::fan_for(bytes)));
  comparison.meet();
  if (here) {
    if (before) on.local.broadcast(data, signature.count, signature.dtype, root_place, call);
    if (comparison.first() && bytes > 0) std::memcpy(comparison.payload_for(root_host), data, bytes);
    comparison.post_to_all(bytes);
  }
  if (before) return comparison.conclude();
  comparison.conclude(
      data, bytes, [&](void* at) { std::memcpy(at, comparison.arrived(), bytes); },
      here && comparison.first());
}

void large_broadcast(Levels& on, const Calling& calling, void* data) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t width = size_of(signature.dtype);
  const Parts parts = Parts::along(layout.hosts(), signature.count * width);
  const HostTree tree = HostTree::of(layout.hosts(), parts.count());
  const int root_host = layout.host_of(signature.root);
  const int here = (layout.host() - root_host + layout.hosts()) % layout.hosts();
  const auto crosser = [&](int host) {
    return layout.partner((root_host + host) % layout.hosts(), signature.root);
  };
  const bool crosses = layout.here()[static_cast<size_t>(layout.place())] == crosser(here);
  const int source = layout.place_of(crosser(here));
  Agreement::Comparison comparison(on.agreement, signature, call, Route::from(root_host, layout.hosts(), tree.fan));
  Crossing crossing(on.wire, call, comparison.digest());
  const auto at = [&](size_t i) { return static_cast<char*>(data) + parts.part(i).offset; };
  const auto pass_on = [&](size_t i) {
    for (int child : tree.children(here, layout.hosts())) crossing.send(at(i), parts.part(i).bytes, crosser(child));
  };
  std::vector<size_t> receives;
  for (size_t i = 0; crosses && here > 0 && i < parts.count(); ++i) {
    receives.push_back(crossing.receive(at(i), parts.part(i).bytes, crosser(tree.parent(here))));
  }
  comparison.meet();
  comparison.post();
  for (size_t i = 0; crosses && here == 0 && i < parts.count(); ++i) pass_on(i);
  comparison.conclude();
  if (here == 0) on.local.broadcast(data, signature.count, signature.dtype, source, call);
  for (size_t i = 0; here > 0 && i < parts.count(); ++i) {
    if (crosses) crossing.await_received(receives[i]);
    if (crosses) pass_on(i);
    on.local.broadcast(at(i), parts.part(i).bytes / width, signature.dtype, source, call);
  }
  crossing.await_all_sent();
}

}  // namespace

void broadcast(Levels& on, const Calling& calling, void* data) {
  if (on.carries_one_way(calling.signature.count * size_of(calling.signature.dtype))) {
    carry_broadcast(on, calling, data);
  } else {
    large_broadcast(on, calling, data);
  }
}

}  // namespace opensmd::levels
