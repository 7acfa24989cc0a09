// The first level of a collective between hosts: the members of one host, in shared memory. A member that is alone on
// its host, or has no shared memory, makes the same calls with itself.
#pragma once

#include <memory>
#include <string>

#include "core/group.hpp"

namespace opensmd {

// How long members of one host wait for each other while they wait `timeout` for other hosts: the member that waits for
// another host then gives up first, and tells its own host what it has waited for. Before that it tries to report to
// the store, which may be behind the same broken link (failure.cpp: kStoresTime).
milliseconds for_each_other(milliseconds timeout);

class Local {
 public:
  Local() = default;  // alone
  explicit Local(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  int rank() const { return group_ ? group_->rank() : 0; }
  int size() const { return group_ ? group_->size() : 1; }
  bool alone() const { return size() == 1; }
  const std::shared_ptr<Group>& group() const { return group_; }

  // As in core/group.hpp.
  void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
              const Call& call);
  void broadcast(void* data, size_t count, DType dtype, int root, const Call& call);
  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call);
  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call);
  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call);
  void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                      double factor, const Call& call);
  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype, const Call& call);

  void abort(const std::string& reason);
  void leave();

 private:
  std::shared_ptr<Group> group_;
};

}  // namespace opensmd
