// The transport of a group that spans hosts, or has more members than one arena takes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "torch/transport.hpp"

namespace opensmd {

// Sizes in bytes from which calls take another path, and of the parts in which they travel; the same on all members
// (collectives/hosts/choices.py).
struct Thresholds {
  size_t carried;    // up to here, what one host sends another goes with the comparison of calls
  size_t ring_from;   // an all_reduce goes along a ring of hosts instead of to all at once
  size_t turns_from;  // in one that may not go along a ring, each host sends to one other at a time
  size_t least_part;  // of an all_reduce in which each host sends to all others at once
  size_t piece;       // of what one member sends another in an all_to_all
  size_t tree_from;  // an all_reduce is a reduce and a broadcast over a tree of hosts
};

// `gloo`: torch's own backend for the same members, with `connections` between any two. `store`: this group's alone,
// for failure reports. `hosts`: the members that share memory, host by host. `local`: the group of this host's members;
// null if it has only one. `names`: of the members, for messages.
std::unique_ptr<Transport> make_gloo_transport(c10::intrusive_ptr<c10d::Backend> gloo, int connections,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               std::vector<std::vector<int>> hosts, std::shared_ptr<Group> local,
                                               const std::vector<std::string>& names, Thresholds thresholds);

}  // namespace opensmd
