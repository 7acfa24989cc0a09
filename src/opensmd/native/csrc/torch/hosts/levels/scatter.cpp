// Large: the root sends pieces to the members of other hosts, and gives its own host's members theirs in shared memory.
#include <cstring>
#include <memory>
#include <vector>

#include "torch/hosts/levels/levels.hpp"

namespace opensmd::levels {
namespace {

// On the root's host.
void scatter_here(Levels& on, const Calling& calling, const void* const* ins, void* out) {
  std::vector<const void*> here;
  for (int member : on.layout.here()) here.push_back(ins == nullptr ? nullptr : ins[member]);
  on.local.scatter(ins == nullptr ? nullptr : here.data(), out, calling.signature.count, calling.signature.dtype,
                   on.layout.place_of(calling.signature.root), calling.call);
}

// The root gives what is for other hosts to its host's first member, which writes it into their frames.
void hand_to_first(Levels& on, const Calling& calling, Agreement::Comparison& comparison, const void* const* ins) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t bytes = signature.count * size_of(signature.dtype);
  const size_t elsewhere = static_cast<size_t>(layout.size()) - layout.here().size();
  auto pieces = std::make_unique_for_overwrite<char[]>(elsewhere * bytes);
  char* next = pieces.get();
  for (int step = 1; ins != nullptr && step < layout.hosts(); ++step) {
    for (int member : layout.members(layout.after(step))) {
      if (bytes > 0) std::memcpy(next, ins[member], bytes);
      next += bytes;
    }
  }
  const int root_place = layout.place_of(signature.root);
  if (root_place != 0) {
    on.local.broadcast(pieces.get(), elsewhere * signature.count, signature.dtype, root_place, call);
  }
  std::vector<size_t> sizes(static_cast<size_t>(layout.hosts()), 0);
  next = pieces.get();
  for (int step = 1; comparison.first() && step < layout.hosts(); ++step) {
    const int host = layout.after(step);
    size_t& of_host = sizes[static_cast<size_t>(host)] = bytes * layout.members(host).size();
    if (of_host > 0) std::memcpy(comparison.payload_for(host), next, of_host);
    next += of_host;
  }
  comparison.post(sizes);
}

void carry_scatter(Levels& on, const Calling& calling, const void* const* ins, void* out) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t bytes = signature.count * size_of(signature.dtype);
  const int root_host = layout.host_of(signature.root);
  Agreement::Comparison comparison(on.agreement, signature, call, Route::from(root_host, layout.hosts()));
  comparison.meet();
  if (layout.host() == root_host) hand_to_first(on, calling, comparison, ins);
  if (layout.host() == root_host && layout.place_of(signature.root) != 0) {
    comparison.conclude();
    return scatter_here(on, calling, ins, out);
  }
  const size_t all = bytes * layout.here().size();
  auto pieces = std::make_unique_for_overwrite<char[]>(all);
  comparison.conclude(pieces.get(), all, [&](void* at) {
    if (layout.host() != root_host) {
      std::memcpy(at, comparison.payload(root_host), all);
      return;
    }
    char* next = static_cast<char*>(at);
    for (int member : layout.here()) {
      std::memcpy(next, ins[member], bytes);
      next += bytes;
    }
  });
  if (bytes > 0) std::memcpy(out, pieces.get() + static_cast<size_t>(layout.place()) * bytes, bytes);
}

void large_scatter(Levels& on, const Calling& calling, const void* const* ins, void* out) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t bytes = signature.count * size_of(signature.dtype);
  const int root_host = layout.host_of(signature.root);
  const bool here = layout.host() == root_host;
  Agreement::Comparison comparison(on.agreement, signature, call, Route::from(root_host, layout.hosts()));
  Crossing crossing(on.wire, call, comparison.digest());
  const size_t piece = here ? 0 : crossing.receive(out, bytes, signature.root);
  comparison.meet();
  comparison.post();
  for (int step = 1; ins != nullptr && step < layout.hosts(); ++step) {
    for (int member : layout.members(layout.after(step))) crossing.send(ins[member], bytes, member);
  }
  comparison.conclude();
  if (here) {
    scatter_here(on, calling, ins, out);
  } else {
    crossing.await_received(piece);
  }
  crossing.await_all_sent();
}

}  // namespace

void scatter(Levels& on, const Calling& calling, const void* const* ins, void* out) {
  const size_t bytes = calling.signature.count * size_of(calling.signature.dtype);
  if (on.carries(bytes * static_cast<size_t>(on.layout.most_on_a_host()))) {
    carry_scatter(on, calling, ins, out);
  } else {
    large_scatter(on, calling, ins, out);
  }
}

}  // namespace opensmd::levels
