// Which members of a group are on which host. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace opensmd {

class Layout {
 public:
  // `hosts`: the members of each host. `member`: this member.
  Layout(std::vector<std::vector<int>> hosts, int member) : hosts_(std::move(hosts)) {
    size_t size = 0;
    for (const auto& members : hosts_) size += members.size();
    host_of_.resize(size);
    place_of_.resize(size);
    for (size_t host = 0; host < hosts_.size(); ++host) {
      for (size_t place = 0; place < hosts_[host].size(); ++place) {
        host_of_[static_cast<size_t>(hosts_[host][place])] = static_cast<int>(host);
        place_of_[static_cast<size_t>(hosts_[host][place])] = static_cast<int>(place);
      }
    }
    host_ = host_of(member);
    place_ = place_of(member);
  }

  // The same members, each on a host of its own.
  Layout apart() const {
    std::vector<std::vector<int>> single;
    for (int member = 0; member < size(); ++member) single.push_back({member});
    return Layout(std::move(single), members(host_)[static_cast<size_t>(place_)]);
  }

  int size() const { return static_cast<int>(host_of_.size()); }
  int hosts() const { return static_cast<int>(hosts_.size()); }
  const std::vector<int>& members(int host) const { return hosts_[static_cast<size_t>(host)]; }
  int host_of(int member) const { return host_of_[static_cast<size_t>(member)]; }
  int place_of(int member) const { return place_of_[static_cast<size_t>(member)]; }

  int member() const { return here()[static_cast<size_t>(place_)]; }  // this one
  int host() const { return host_; }    // of this member
  int place() const { return place_; }  // of this member among those of its host
  const std::vector<int>& here() const { return members(host_); }
  // The host `steps` after this one, so that every host begins with a different one.
  int after(int steps) const { return (host_ + steps) % hosts(); }

  int most_on_a_host() const { return static_cast<int>(widest(true)); }
  int fewest_on_a_host() const { return static_cast<int>(widest(false)); }

  // The member of `host` through which data from or for a member of another host travels.
  int partner(int host, int member) const {
    const auto& all = members(host);
    return all[static_cast<size_t>(place_of(member)) % all.size()];
  }

 private:
  size_t widest(bool most) const {
    size_t found = hosts_[0].size();
    for (const auto& members : hosts_) {
      found = most ? std::max(found, members.size()) : std::min(found, members.size());
    }
    return found;
  }

  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_;
  std::vector<int> place_of_;
  int host_ = 0;
  int place_ = 0;
};

// The hosts of a broadcast or reduce as a tree: a chain, whose busiest link carries the data once but which is as deep
// as there are hosts, or, for many hosts, a binary tree.
struct HostTree {
  int fan;
  int depth;

  static HostTree of(int hosts, size_t parts) {
    int depth = 0;
    for (int reached = 1; reached < hosts; reached = 2 * reached + 1) ++depth;
    const HostTree chain{1, hosts - 1}, tree{2, depth};
    return chain.steps(parts) <= tree.steps(parts) ? chain : tree;
  }
  // For data in a single part: sending it more than once takes time, unless it is small.
  static int fan_for(size_t bytes) {
    constexpr size_t kLittle = 4u << 10;
    return bytes <= kLittle ? 4 : 2;
  }
  // How many parts the busiest link carries in a row until all have arrived.
  size_t steps(size_t parts) const {
    return static_cast<size_t>(fan) * (parts + static_cast<size_t>(std::max(depth - 1, 0)));
  }

  // Hosts are numbered from the root's.
  int parent(int host) const { return (host - 1) / fan; }
  std::vector<int> children(int host, int hosts) const {
    std::vector<int> found;
    for (int child = fan * host + 1; child <= fan * host + fan && child < hosts; ++child) found.push_back(child);
    return found;
  }
};

}  // namespace opensmd
