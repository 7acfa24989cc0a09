// Large: members of other hosts send their pieces to the root; those of its own host give them in shared memory.
#include <cstring>
#include <memory>
#include <vector>

#include "torch/hosts/levels/levels.hpp"

namespace opensmd::levels {
namespace {

// On the root's host.
void gather_here(Levels& on, const Calling& calling, const void* in, void* const* outs) {
  std::vector<void*> here;
  for (int member : on.layout.here()) here.push_back(outs == nullptr ? nullptr : outs[member]);
  on.local.gather(in, outs == nullptr ? nullptr : here.data(), calling.signature.count, calling.signature.dtype,
                  on.layout.place_of(calling.signature.root), calling.call);
}

void put_pieces(const Layout& layout, int host, const void* from, size_t bytes, void* const* outs) {
  const char* next = static_cast<const char*>(from);
  for (int member : layout.members(host)) {
    if (bytes > 0) std::memcpy(outs[member], next, bytes);
    next += bytes;
  }
}

// On the root's host: the first member, possibly another, hands the root what it got from the other hosts.
void conclude_for_root(Levels& on, const Calling& calling, Agreement::Comparison& comparison, void* const* outs) {
  const Layout& layout = on.layout;
  const size_t bytes = calling.signature.count * size_of(calling.signature.dtype);
  if (layout.place_of(calling.signature.root) == 0) {
    comparison.conclude_on_first();
    for (int step = 1; outs != nullptr && step < layout.hosts(); ++step) {
      put_pieces(layout, layout.after(step), comparison.payload(layout.after(step)), bytes, outs);
    }
    return;
  }
  const size_t elsewhere = (static_cast<size_t>(layout.size()) - layout.here().size()) * bytes;
  auto pieces = std::make_unique_for_overwrite<char[]>(elsewhere);
  comparison.conclude(pieces.get(), elsewhere, [&](void* at) {
    char* next = static_cast<char*>(at);
    for (int step = 1; step < layout.hosts(); ++step) {
      const size_t of_host = bytes * layout.members(layout.after(step)).size();
      std::memcpy(next, comparison.payload(layout.after(step)), of_host);
      next += of_host;
    }
  });
  const char* next = pieces.get();
  for (int step = 1; outs != nullptr && step < layout.hosts(); ++step) {
    put_pieces(layout, layout.after(step), next, bytes, outs);
    next += bytes * layout.members(layout.after(step)).size();
  }
}

void carry_gather(Levels& on, const Calling& calling, const void* in, void* const* outs) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t bytes = signature.count * size_of(signature.dtype);
  const int root_host = layout.host_of(signature.root);
  Agreement::Comparison comparison(on.agreement, signature, call, Route::to(root_host, layout.hosts()));
  comparison.meet();
  if (layout.host() == root_host) {
    gather_here(on, calling, in, outs);
  } else {
    std::vector<void*> pieces;
    for (size_t place = 0; comparison.first() && place < layout.here().size(); ++place) {
      pieces.push_back(comparison.payload_for(root_host) + place * bytes);
    }
    on.local.gather(in, comparison.first() ? pieces.data() : nullptr, signature.count, signature.dtype, 0, call);
    std::vector<size_t> sizes(static_cast<size_t>(layout.hosts()), 0);
    sizes[static_cast<size_t>(root_host)] = bytes * layout.here().size();
    comparison.post(sizes);
  }
  if (layout.host() == root_host) return conclude_for_root(on, calling, comparison, outs);
  comparison.conclude_on_first();
}

void large_gather(Levels& on, const Calling& calling, const void* in, void* const* outs) {
  const auto& [signature, call] = calling;
  const Layout& layout = on.layout;
  const size_t bytes = signature.count * size_of(signature.dtype);
  const int root_host = layout.host_of(signature.root);
  Agreement::Comparison comparison(on.agreement, signature, call, Route::to(root_host, layout.hosts()));
  Crossing crossing(on.wire, call, comparison.digest());
  std::vector<size_t> receives;
  for (int step = 1; outs != nullptr && step < layout.hosts(); ++step) {
    for (int member : layout.members(layout.after(step))) {
      receives.push_back(crossing.receive(outs[member], bytes, member));
    }
  }
  comparison.meet();
  comparison.post();
  if (layout.host() != root_host) crossing.send(in, bytes, signature.root);
  comparison.conclude();
  if (layout.host() == root_host) gather_here(on, calling, in, outs);
  for (size_t receive : receives) crossing.await_received(receive);
  crossing.await_all_sent();
}

}  // namespace

void gather(Levels& on, const Calling& calling, const void* in, void* const* outs) {
  const size_t bytes = calling.signature.count * size_of(calling.signature.dtype);
  if (on.carries(bytes * static_cast<size_t>(on.layout.most_on_a_host()))) {
    carry_gather(on, calling, in, outs);
  } else {
    large_gather(on, calling, in, outs);
  }
}

}  // namespace opensmd::levels
