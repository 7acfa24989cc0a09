// What the adapter asks of whatever moves a group's bytes. There are two: the core (one host) and Gloo (several hosts,
// or more members than one arena takes). Both follow core/group.hpp: blocking calls on plain memory, members by group
// rank, failures as CollectiveError, wrong arguments as std::invalid_argument.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

#include "core/group.hpp"
#include "core/kernels/compression.hpp"

namespace opensmd {

class Transport {
 public:
  virtual ~Transport() = default;

  virtual void barrier(const Call& call) = 0;
  virtual void all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor,
                          const Call& call) = 0;
  // A sum or average of float32 numbers, sent between hosts in fewer bytes. `residual`, if not null, takes what each
  // number loses by that, and is left alone if nothing is lost.
  virtual void all_reduce_compressed(float* data, size_t count, Reduction reduction, Compression, float* /*residual*/,
                                     const Call& call) {
    all_reduce(data, count, DType::F32, reduction, 1.0, call);
  }
  virtual void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root,
                      double factor, const Call& call) = 0;
  virtual void broadcast(void* data, size_t count, DType dtype, int root, const Call& call) = 0;
  virtual void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) = 0;
  virtual void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) = 0;
  virtual void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) = 0;
  virtual void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype,
                              Reduction reduction, double factor, const Call& call) = 0;
  virtual void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs,
                          const size_t* out_counts, DType dtype, const Call& call) = 0;

  virtual std::shared_ptr<Request> post_send(const at::Tensor& tensor, int destination, int64_t tag) = 0;
  virtual std::shared_ptr<Request> post_receive(const at::Tensor& tensor, int source, int64_t tag) = 0;

  virtual void abort(const std::string& reason) = 0;
  virtual bool aborted() const = 0;
  virtual void leave() = 0;

  // The group in shared memory, if there is one: for its heap, mailbox and records.
  virtual std::shared_ptr<Group> shared() const { return nullptr; }
  // That group, or, if other hosts have members, the group of this host's.
  virtual std::shared_ptr<Group> local() const { return shared(); }
  // Which member of this group the member `place` of local() is.
  virtual int member_at(int place) const { return place; }
};

std::unique_ptr<Transport> make_shared_transport(std::shared_ptr<Group> group);

}  // namespace opensmd
