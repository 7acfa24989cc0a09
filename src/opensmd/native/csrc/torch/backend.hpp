// The "smddp" process group as torch sees it: one c10d::Backend for CPU tensors (a Transport) and, through torch's
// NCCL, for CUDA tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch/queue.hpp"
#include "torch/tensors.hpp"
#include "torch/timeline/profiled.hpp"
#include "torch/transport.hpp"
#include "torch/work.hpp"

namespace opensmd {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr const char* kBackendName = "smddp";

struct SmddpOptions : c10d::Backend::Options {
  explicit SmddpOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout,
                        Compression compression = Compression::None)
      : Options(kBackendName, timeout), compression(compression) {}

  Compression compression;  // between hosts, for every float32 sum and average by all_reduce
};

// What only Python can do for a backend.
struct Makers {
  // torch's backend for CUDA tensors of the same members; throws where there is none.
  std::function<BackendPtr()> device_backend;
  // Returns when all members have arrived, before their first collective on a device.
  std::function<void()> meet_on_device;
  // A new smddp backend for members of this one, given as (store, rank, ranks of this group, options).
  std::function<BackendPtr(c10::intrusive_ptr<c10d::Store>, int, std::vector<int>, c10::intrusive_ptr<SmddpOptions>)>
      split;
};

class SmddpBackend : public c10d::Backend {
 public:
  // `name` is what messages call this rank, e.g. "rank 3", by its global rank.
  SmddpBackend(std::unique_ptr<Transport> transport, std::string name, int rank, int size,
               c10::intrusive_ptr<SmddpOptions> options, Makers makers);
  ~SmddpBackend() override;
  void release_resources() override;

  const std::string getBackendName() const override { return kBackendName; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  std::shared_ptr<Group> shared_group() const { return transport_->shared(); }
  // Those of this host that have died, become another program or left the group, with their states.
  std::vector<std::pair<int, MemberState>> lost_members() const;
  // For the timeline: records under this group number of the process's EventLog.
  void record_as(uint32_t group);

  // Collectives (collectives/)
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  // Asynchronous. `residual`: none, or as many float32 numbers as `tensor`: they are added to it, then hold what its
  // numbers lost on their way between hosts, for the next call.
  WorkPtr all_reduce_compressed(const at::Tensor& tensor, Reduction reduction, Compression compression,
                                const std::optional<at::Tensor>& residual);
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // Messages (messages.cpp)
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Life (backend.cpp)
  bool supportsSplitting() const override { return true; }
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const c10::intrusive_ptr<Options>& opts) override;
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  // Of the last collective issued: torch's debug wrapper compares it among ranks, some of which may not have run it
  // yet.
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  // For torch's reducer: pairs of real numbers in place of complex ones, and none of NCCL's memory. All other callers
  // use allocate.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  at::Tensor allocate(long size, at::TensorOptions options);
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  BackendPtr device_backend();  // torch's NCCL for the same members, made on first use
  void abort() override;
  void abort(const std::string& reason);  // which all members get
  void shutdown() override;

 private:
  struct Signature;

  // Runs a collective now (sync) or queues it; `run` may throw what the core throws. Profilers see the `inputs`.
  template <typename Run>
  WorkPtr issue(c10d::OpType type, const char* title, bool async, Tensors outputs, at::TensorList inputs, Run run);
  template <typename Run>
  WorkPtr start(c10d::OpType type, const char* title, bool async, Tensors outputs, at::TensorList inputs,
                uint64_t sequence, Run run);
  std::function<void()> recorded(const char* title, const Tensors& outputs, uint64_t sequence,
                                 std::function<void()> run) const;
  WorkPtr message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag);
  Event message_event(const char* title, const at::Tensor& tensor, int peer, uint64_t start_ns) const;

  void require_usable() const;
  BackendPtr device_collectives();
  Call call(const ShapeText& text, std::chrono::milliseconds timeout) const {
    return {text.view(), timeout.count() > 0 ? timeout : timeout_.load()};
  }
  WorkPtr note(WorkPtr work);

  void run_all_reduce(const at::Tensor& tensor, const Reducing& how, std::chrono::milliseconds timeout);
  // Whether the whole group's sums are compressed (collectives/compressed.cpp).
  bool compresses(const at::Tensor& tensor, Reduction reduction) const;
  void run_all_reduce_compressed(const at::Tensor& tensor, Reduction reduction, Compression compression,
                                 const std::optional<at::Tensor>& residual, std::chrono::milliseconds timeout);
  void run_all_reduce_coalesced(const Tensors& tensors, const Reducing& how, std::chrono::milliseconds timeout);
  void run_all_reduce_sparse(const at::Tensor& tensor, std::chrono::milliseconds timeout);
  at::Tensor gather_rows(const at::Tensor& rows, const std::vector<int64_t>& counts,
                         std::chrono::milliseconds timeout);
  void run_all_gather(const Tensors& outputs, const at::Tensor& input, std::chrono::milliseconds timeout);
  void run_all_gather_into(const at::Tensor& output, const at::Tensor& input, std::chrono::milliseconds timeout);
  void run_reduce_scatter(const at::Tensor& output, const Tensors& inputs, const Reducing& how,
                          std::chrono::milliseconds timeout);
  void run_reduce_scatter_from(const at::Tensor& output, const at::Tensor& input, const Reducing& how,
                               std::chrono::milliseconds timeout);
  void run_all_to_all(const Tensors& outputs, const Tensors& inputs, std::chrono::milliseconds timeout);

  std::unique_ptr<Transport> transport_;
  const std::string name_;
  std::shared_ptr<Unclaimed> unclaimed_;  // in shared memory only: a Gloo message ends with its handle
  c10::intrusive_ptr<SmddpOptions> options_;
  Makers makers_;
  std::shared_ptr<CallQueue> queue_ = std::make_shared<CallQueue>();
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<uint64_t> issued_{0};    // collectives
  std::atomic<uint64_t> messages_{0};
  std::atomic<bool> closed_{false};
  std::atomic<uint32_t> timeline_group_{0};  // between hosts, if a timeline is wanted: the core records the rest
  const MakingProcess process_;

  std::mutex device_mutex_;
  BackendPtr device_backend_;
  bool device_aborted_ = false;  // leaves nothing for shutdown to end in order
  std::mutex meeting_mutex_;
  std::atomic<bool> met_on_device_{false};

  // torch asks for a split once per device type; one backend serves them all.
  std::string split_name_;
  c10::weak_intrusive_ptr<c10d::Backend> split_{c10::intrusive_ptr<c10d::Backend>()};

  std::mutex coalescing_mutex_;
  bool coalescing_ = false;
  bool device_coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

template <typename Run>
WorkPtr SmddpBackend::issue(c10d::OpType type, const char* title, bool async, Tensors outputs, at::TensorList inputs,
                            Run run) {
  require_usable();
  const auto sequence = ++issued_;
  if (timeline_group_ != 0) {
    return start(type, title, async, outputs, inputs, sequence, recorded(title, outputs, sequence, std::move(run)));
  }
  return start(type, title, async, std::move(outputs), inputs, sequence, std::move(run));
}

template <typename Run>
WorkPtr SmddpBackend::start(c10d::OpType type, const char* title, bool async, Tensors outputs, at::TensorList inputs,
                            uint64_t sequence, Run run) {
  if (!async) {
    const Profiled profiled(title, inputs);
    with_torch_errors([&] { queue_->run_now(run); });
    return nullptr;
  }
  auto work = c10::make_intrusive<QueuedWork>(rank_, type, title, std::move(outputs), inputs, sequence, queue_);
  // A queued call keeps its group.
  auto self = c10::intrusive_ptr<SmddpBackend>::unsafe_reclaim_from_nonowning(this);
  QueuedWork::post(work, [self = std::move(self), run = std::move(run)] { with_torch_errors(run); });
  return note(work);
}

}  // namespace opensmd
