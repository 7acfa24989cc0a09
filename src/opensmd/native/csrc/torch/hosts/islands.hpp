// all_reduce in two levels, for groups of which several members share a host (an island): fewer bytes travel between
// hosts. Each island reduces in shared memory, a slice for each member that crosses; members that have the same slice
// on all hosts reduce it among themselves; the islands gather the slices in shared memory. 2 * bytes * (hosts - 1) /
// hosts leave a host, however many members it has.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch/hosts/agreement.hpp"
#include "torch/hosts/failure.hpp"
#include "torch/hosts/slices.hpp"
#include "torch/transport.hpp"

namespace opensmd {

class Islands {
 public:
  // How many parts may travel at once, each over connections of its own.
  static constexpr size_t kLanes = 2;

  // `peers`, one a lane, join this member with its counterparts: those of its place on the other hosts. None from place
  // `crossing` on, which the smallest host does not have. `members` is the size of the whole group.
  Islands(std::shared_ptr<Group> island, std::vector<std::unique_ptr<Transport>> peers, int crossing, int members);

  // Whether sums in two levels are what they would be in one: narrow floats would be rounded twice.
  static bool serves(DType dtype, Reduction reduction);

  // `agreement` is that of the whole group, `signature` its call. After a failure no other call may follow, but abort.
  void all_reduce(Agreement& agreement, const Signature& signature, void* data, double factor, const Call& call);
  void abort(const std::string& reason);
  void leave();

 private:
  void sum_with_comparison(Agreement& agreement, const Signature& signature, void* data, double factor,
                           const Call& call);
  void sum_in_parts(Agreement& agreement, const Signature& signature, char* data, double factor, const Call& call);
  void cross(const Slices& part, size_t lane, DType dtype, Reduction reduction, const Call& call);

  std::shared_ptr<Group> island_;
  std::mutex closing_;  // abort may come from any thread
  std::vector<std::unique_ptr<Transport>> peers_;
  const int crossing_;
  const int members_;
};

// `gloo` is torch's own backend for the same members, `failure` theirs. `agreement` compares calls; null where
// somebody else has compared them. `islands` may be null.
std::unique_ptr<Transport> make_gloo_transport(c10::intrusive_ptr<c10d::Backend> gloo, std::shared_ptr<Failure> failure,
                                               std::unique_ptr<Agreement> agreement,
                                               std::unique_ptr<Islands> islands);

}  // namespace opensmd
