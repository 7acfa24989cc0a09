// Members on several hosts: bytes travel through torch's Gloo, sums are made here by the core's kernels.
//
// Gloo only ever sees runs of bytes, so that dtypes, reductions and shapes that it refuses work all the same, and
// results have the same bits on all ranks: every slice is reduced by one member, in the order of ranks.
// all_reduce: reduce-scatter (an all-to-all of slices), then all-gather; 2 * bytes * (size - 1) / size a member. Where
// members share hosts, it goes over islands (islands.hpp).
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/kernels.hpp"
#include "torch/islands.hpp"
#include "torch/transport.hpp"

namespace opensmd {
namespace {

using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<size_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

at::Tensor bytes_at(const void* data, size_t bytes) {
  // Gloo does not write to inputs, but torch has no read-only tensors.
  if (bytes == 0) return at::empty({0}, at::kByte);
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

at::Tensor new_bytes(size_t bytes) { return at::empty({static_cast<int64_t>(bytes)}, at::kByte); }

size_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

Sizes in_bytes(const size_t* counts, int size, DType dtype) {
  Sizes bytes(counts, counts + size);
  for (auto& each : bytes) each *= size_of(dtype);
  return bytes;
}

// Gloo completes a message only in wait(), so asking whether it is done needs a thread that waits.
class GlooRequest final : public Request {
 public:
  GlooRequest(WorkPtr work, at::Tensor bytes, milliseconds timeout)
      : work_(std::move(work)), bytes_(std::move(bytes)), timeout_(timeout) {}

  bool done() override {
    std::lock_guard lock(mutex_);
    if (finished_) return true;
    start_waiting(timeout_);
    return waiting_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }

  void wait(milliseconds timeout) override {
    {
      std::lock_guard lock(mutex_);
      if (!finished_) start_waiting(timeout.count() > 0 ? timeout : timeout_);
    }
    try {
      waiting_.get();
    } catch (const std::exception& error) {
      throw CollectiveError(std::string("a message through Gloo failed: ") + error.what());
    }
    std::lock_guard lock(mutex_);
    finished_ = true;
  }

  int source() const override { return work_->sourceRank(); }
  size_t received_bytes() const override { return bytes_.nbytes(); }

 private:
  void start_waiting(milliseconds timeout) {
    if (waiting_.valid()) return;
    waiting_ = std::async(std::launch::async, [work = work_, timeout] { work->wait(timeout); }).share();
  }

  WorkPtr work_;
  at::Tensor bytes_;
  const milliseconds timeout_;
  std::mutex mutex_;
  std::shared_future<void> waiting_;
  bool finished_ = false;
};

class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<std::string> names,
                std::unique_ptr<Islands> islands)
      : gloo_(std::move(gloo)),
        islands_(std::move(islands)),
        names_(std::move(names)),
        rank_(gloo_->getRank()),
        size_(gloo_->getSize()) {}

  void barrier(const Call& call) override {
    c10d::BarrierOptions options;
    complete("barrier", call, options, [&] { return gloo_->barrier(options); });
  }

  void all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor,
                  const Call& call) override {
    if (islands_ && Islands::serves(dtype, reduction)) {
      over_islands(data, count, dtype, reduction, factor, call);
      return;
    }
    if (count > 0 && sums(dtype, reduction)) {
      by_gloo(data, count, dtype, reduction, call);
      return;
    }
    auto all = cut(data, count, dtype, size_, size_);
    reduce_scatter(all.inputs(), all.counts.data(), all.data[rank_], dtype, reduction, factor, call);
    all_gather(all.data[rank_], all.outputs(), all.counts.data(), dtype, call);
  }

  void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
              const Call& call) override {
    at::Tensor copy = bytes_at(in, count * size_of(dtype)).clone();
    all_reduce(copy.data_ptr(), count, dtype, reduction, factor, call);
    if (rank_ == root) put(out, copy);
  }

  void broadcast(void* data, size_t count, DType dtype, int root, const Call& call) override {
    Tensors tensors{bytes_at(data, count * size_of(dtype))};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    complete("broadcast", call, options, [&] { return gloo_->broadcast(tensors, options); });
  }

  // Gloo wants equal sizes: shorter contributions are padded.
  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) override {
    Sizes bytes = in_bytes(counts, size_, dtype);
    size_t most = *std::max_element(bytes.begin(), bytes.end());
    Tensors inputs{new_bytes(most)};
    put(inputs[0].data_ptr(), bytes_at(in, bytes[rank_]));
    std::vector<Tensors> outputs(1);
    for (int i = 0; i < size_; ++i) outputs[0].push_back(new_bytes(most));
    c10d::AllgatherOptions options;
    complete("all_gather", call, options, [&] { return gloo_->allgather(outputs, inputs, options); });
    for (int i = 0; i < size_; ++i) put(outs[i], outputs[0][i].narrow(0, 0, static_cast<int64_t>(bytes[i])));
  }

  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) override {
    size_t bytes = count * size_of(dtype);
    Tensors inputs{bytes_at(in, bytes)};
    std::vector<Tensors> outputs;
    if (rank_ == root) {
      outputs.emplace_back();
      for (int i = 0; i < size_; ++i) outputs[0].push_back(new_bytes(bytes));
    }
    c10d::GatherOptions options;
    options.rootRank = root;
    complete("gather", call, options, [&] { return gloo_->gather(outputs, inputs, options); });
    for (int i = 0; rank_ == root && i < size_; ++i) put(outs[i], outputs[0][i]);
  }

  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) override {
    size_t bytes = count * size_of(dtype);
    Tensors outputs{bytes_at(out, bytes)};
    std::vector<Tensors> inputs;
    if (rank_ == root) {
      inputs.emplace_back();
      for (int i = 0; i < size_; ++i) inputs[0].push_back(bytes_at(ins[i], bytes));
    }
    c10d::ScatterOptions options;
    options.rootRank = root;
    complete("scatter", call, options, [&] { return gloo_->scatter(outputs, inputs, options); });
  }

  void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                      double factor, const Call& call) override {
    Reducer reducer(dtype, reduction, size_);
    auto factors = everyones(factor, reduction, call);
    size_t own = counts[rank_] * size_of(dtype);
    at::Tensor received = exchange(ins, in_bytes(counts, size_, dtype), Sizes(static_cast<size_t>(size_), own), call);
    std::vector<const void*> inputs;
    for (int i = 0; i < size_; ++i) inputs.push_back(received.data_ptr<uint8_t>() + static_cast<size_t>(i) * own);
    if (own > 0) reducer(&out, 1, inputs.data(), size_, own, factors.data());
  }

  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype, const Call& call) override {
    Sizes out_bytes = in_bytes(out_counts, size_, dtype);
    at::Tensor received = exchange(ins, in_bytes(in_counts, size_, dtype), out_bytes, call);
    int64_t start = 0;
    for (int i = 0; i < size_; ++i) {
      auto length = static_cast<int64_t>(out_bytes[i]);
      put(outs[i], received.narrow(0, start, length));
      start += length;
    }
  }

  std::shared_ptr<Request> post_send(const at::Tensor& tensor, int destination, int64_t tag) override {
    Tensors bytes{bytes_at(tensor.const_data_ptr(), tensor.nbytes())};
    return post(bytes, destination, [&] { return gloo_->send(bytes, destination, static_cast<int>(tag)); });
  }

  std::shared_ptr<Request> post_receive(const at::Tensor& tensor, int source, int64_t tag) override {
    Tensors bytes{bytes_at(tensor.data_ptr(), tensor.nbytes())};
    return post(bytes, source, [&] {
      return source == kAnySource ? gloo_->recvAnysource(bytes, static_cast<int>(tag))
                                  : gloo_->recv(bytes, source, static_cast<int>(tag));
    });
  }

  void abort(const std::string& reason) override {
    note_failure(reason);
    if (islands_) islands_->abort(reason);
    gloo_->abort();
  }
  bool aborted() const override {
    std::lock_guard lock(mutex_);
    return !failure_.empty();
  }
  void leave() override {
    if (islands_) islands_->leave();
    gloo_->shutdown();
  }
  uint64_t sequence() const override { return sequence_; }

 private:
  static void put(void* to, const at::Tensor& from) {
    if (from.nbytes() > 0) std::memcpy(to, from.const_data_ptr(), from.nbytes());
  }

  void over_islands(void* data, size_t count, DType dtype, Reduction reduction, double factor, const Call& call) {
    require_usable();
    ++sequence_;
    try {
      islands_->all_reduce(data, count, dtype, reduction, factor, call);
    } catch (const std::exception& error) {
      note_failure(where("all_reduce") + error.what());
      require_usable();
    }
  }

  // What Gloo's own ring adds up as the kernels do; it overlaps sums and transfers, and copies less.
  static bool sums(DType dtype, Reduction reduction) {
    const bool wide = dtype == DType::F32 || dtype == DType::F64;
    return reduction == Reduction::Sum ? wide || dtype == DType::I32 || dtype == DType::I64
                                       : reduction == Reduction::Average && wide;
  }

  void by_gloo(void* data, size_t count, DType dtype, Reduction reduction, const Call& call) {
    const auto type = dtype == DType::F32   ? at::kFloat
                      : dtype == DType::F64 ? at::kDouble
                      : dtype == DType::I32 ? at::kInt
                                            : at::kLong;
    Tensors tensors{at::from_blob(data, {static_cast<int64_t>(count)}, type)};
    c10d::AllreduceOptions options;
    complete("all_reduce", call, options, [&] { return gloo_->allreduce(tensors, options); });
    if (reduction == Reduction::Average) average_sums(data, count, dtype, size_);
  }

  // ins[i] goes to member i; what comes from all members is returned in a row.
  at::Tensor exchange(const void* const* ins, const Sizes& in_sizes, const Sizes& out_sizes, const Call& call) {
    at::Tensor sent = new_bytes(sum(in_sizes));
    at::Tensor received = new_bytes(sum(out_sizes));
    auto* next = sent.data_ptr<uint8_t>();
    for (int i = 0; i < size_; ++i) {
      put(next, bytes_at(ins[i], in_sizes[i]));
      next += in_sizes[i];
    }
    std::vector<int64_t> in_splits(in_sizes.begin(), in_sizes.end());
    std::vector<int64_t> out_splits(out_sizes.begin(), out_sizes.end());
    c10d::AllToAllOptions options;
    complete("all_to_all", call, options,
             [&] { return gloo_->alltoall_base(received, sent, out_splits, in_splits, options); });
    return received;
  }

  std::vector<double> everyones(double factor, Reduction reduction, const Call& call) {
    std::vector<double> factors(static_cast<size_t>(size_), 1.0);
    if (reduction != Reduction::PremulSum) return factors;
    std::vector<void*> outs;
    for (auto& each : factors) outs.push_back(&each);
    Sizes counts(factors.size(), 1);
    all_gather(&factor, outs.data(), counts.data(), DType::F64, call);
    return factors;
  }

  template <typename Options, typename Start>
  void complete(const char* operation, const Call& call, Options& options, Start start) {
    require_usable();
    ++sequence_;
    if (call.timeout.count() > 0) options.timeout = call.timeout;
    options.asyncOp = true;
    try {
      start()->wait();
    } catch (const std::exception& error) {
      note_failure(where(operation) + "Gloo said: " + error.what());
      require_usable();
    }
  }

  template <typename Start>
  std::shared_ptr<Request> post(Tensors& bytes, int peer, Start start) {
    require_usable();
    if (peer == rank_) {
      throw std::invalid_argument("a rank of a group that spans hosts cannot send to itself: Gloo has no connection "
                                  "for it. Copy the tensor instead");
    }
    try {
      auto work = start();
      return std::make_shared<GlooRequest>(work, bytes[0], gloo_->getBackendOptions()->timeout);
    } catch (const std::exception& error) {
      throw CollectiveError(c10::str(names_[rank_], ": a message through Gloo failed: ", error.what()));
    }
  }

  // Peers of islands have no names: the whole group says where it was.
  std::string where(const char* operation) const {
    if (names_.empty()) return "";
    return c10::str(names_[rank_], " in ", operation, " (collective ", sequence_.load(),
                    ") of a group that spans hosts: ");
  }

  // The first failure is the one that later calls report.
  void note_failure(const std::string& cause) {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = cause;
  }
  void require_usable() const {
    std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw Aborted(failure_);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::unique_ptr<Islands> islands_;  // null where no two members share a host
  const std::vector<std::string> names_;
  const int rank_;
  const int size_;
  std::atomic<uint64_t> sequence_{0};
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<std::string> names,
                                               std::unique_ptr<Islands> islands) {
  return std::make_unique<GlooTransport>(std::move(gloo), std::move(names), std::move(islands));
}

}  // namespace opensmd
