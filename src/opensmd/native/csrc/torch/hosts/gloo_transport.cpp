// Members on several hosts: bytes travel through torch's Gloo, sums are made here by the core's kernels.
//
// Gloo only ever sees runs of bytes, so that dtypes, reductions and shapes that it refuses work all the same, and
// results have the same bits on all ranks: every slice is reduced by one member, in the order of ranks.
// all_reduce: reduce-scatter (an all-to-all of slices), then all-gather; 2 * bytes * (size - 1) / size a member. Where
// members share hosts, it goes over islands (islands.hpp). Every call is compared first (agreement.hpp); a few bytes of
// a sum travel with the comparison.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/algorithms/counts.hpp"
#include "core/kernels/kernels.hpp"
#include "torch/hosts/agreement.hpp"
#include "torch/hosts/failure.hpp"
#include "torch/hosts/islands.hpp"
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

size_t total(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }

Sizes in_bytes(const size_t* counts, int size, DType dtype) {
  Sizes bytes(counts, counts + size);
  for (auto& each : bytes) each *= size_of(dtype);
  return bytes;
}

// Gloo completes a message only in wait(), so asking whether it is done needs a thread that waits.
class GlooRequest final : public Request {
 public:
  // `where` is what messages call it.
  GlooRequest(WorkPtr work, at::Tensor bytes, milliseconds timeout, std::shared_ptr<Failure> failure, std::string where)
      : work_(std::move(work)),
        bytes_(std::move(bytes)),
        timeout_(timeout),
        failure_(std::move(failure)),
        where_(std::move(where)) {}

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
      throw CollectiveError(failure_->note_message(where_, error));
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
  const std::shared_ptr<Failure> failure_;
  const std::string where_;
  std::mutex mutex_;
  std::shared_future<void> waiting_;
  bool finished_ = false;
};

Signature signature_of(Operation operation, DType dtype, size_t count, int root = -1,
                       Reduction reduction = Reduction::Sum) {
  Signature signature;
  signature.operation = operation;
  signature.dtype = dtype;
  signature.reduction = reduction;
  signature.root = root;
  signature.count = count;
  return signature;
}

class GlooTransport final : public Transport {
 public:
  GlooTransport(c10::intrusive_ptr<c10d::Backend> gloo, std::shared_ptr<Failure> failure,
                std::unique_ptr<Agreement> agreement, std::unique_ptr<Islands> islands)
      : gloo_(std::move(gloo)),
        failure_(std::move(failure)),
        agreement_(std::move(agreement)),
        islands_(std::move(islands)),
        rank_(gloo_->getRank()),
        size_(gloo_->getSize()) {}

  // A comparison is a barrier.
  void barrier(const Call& call) override {
    collective(signature_of(Operation::Barrier, DType::Byte, 0), call, [] {});
  }

  void all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor,
                  const Call& call) override {
    const Reducer reducer(dtype, reduction, size_);
    const auto signature = signature_of(Operation::AllReduce, dtype, count, -1, reduction);
    if (islands_ && Islands::serves(dtype, reduction)) {
      guarded(signature, call, [&] { islands_->all_reduce(*agreement_, signature, data, factor, call); });
    } else if (agreement_ && !islands_ && agreement_->carries(count * size_of(dtype))) {
      guarded(signature, call, [&] { sum_with_comparison(reducer, signature, data, factor, call); });
    } else {
      collective(signature, call, [&] { sum_all(data, count, dtype, reduction, factor, call); });
    }
  }

  void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
              const Call& call) override {
    const Reducer reducer(dtype, reduction, size_);
    collective(signature_of(Operation::Reduce, dtype, count, root, reduction), call, [&] {
      at::Tensor copy = bytes_at(in, count * size_of(dtype)).clone();
      sum_all(copy.data_ptr(), count, dtype, reduction, factor, call);
      if (rank_ == root) put(out, copy);
    });
  }

  void broadcast(void* data, size_t count, DType dtype, int root, const Call& call) override {
    collective(signature_of(Operation::Broadcast, dtype, count, root), call, [&] {
      Tensors tensors{bytes_at(data, count * size_of(dtype))};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      complete(call, options, [&] { return gloo_->broadcast(tensors, options); });
    });
  }

  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) override {
    auto signature = signature_of(Operation::AllGather, dtype, std::accumulate(counts, counts + size_, size_t{0}));
    signature.shape_hash = hash_of_counts(counts, size_);
    collective(signature, call, [&] { gather_all(in, outs, counts, dtype, call); });
  }

  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) override {
    collective(signature_of(Operation::Gather, dtype, count, root), call, [&] {
      size_t bytes = count * size_of(dtype);
      Tensors inputs{bytes_at(in, bytes)};
      std::vector<Tensors> outputs;
      if (rank_ == root) {
        outputs.emplace_back();
        for (int i = 0; i < size_; ++i) outputs[0].push_back(new_bytes(bytes));
      }
      c10d::GatherOptions options;
      options.rootRank = root;
      complete(call, options, [&] { return gloo_->gather(outputs, inputs, options); });
      for (int i = 0; rank_ == root && i < size_; ++i) put(outs[i], outputs[0][i]);
    });
  }

  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) override {
    collective(signature_of(Operation::Scatter, dtype, count, root), call, [&] {
      size_t bytes = count * size_of(dtype);
      Tensors outputs{bytes_at(out, bytes)};
      std::vector<Tensors> inputs;
      if (rank_ == root) {
        inputs.emplace_back();
        for (int i = 0; i < size_; ++i) inputs[0].push_back(bytes_at(ins[i], bytes));
      }
      c10d::ScatterOptions options;
      options.rootRank = root;
      complete(call, options, [&] { return gloo_->scatter(outputs, inputs, options); });
    });
  }

  void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                      double factor, const Call& call) override {
    const Reducer reducer(dtype, reduction, size_);
    auto signature = signature_of(Operation::ReduceScatter, dtype, std::accumulate(counts, counts + size_, size_t{0}),
                                  -1, reduction);
    signature.shape_hash = hash_of_counts(counts, size_);
    collective(signature, call, [&] { scatter_sums(ins, counts, out, dtype, reduction, factor, call); });
  }

  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype, const Call& call) override {
    const auto count = std::accumulate(in_counts, in_counts + size_, size_t{0});
    collective(signature_of(Operation::AllToAll, dtype, count), call, [&] {
      compare_splits(in_counts, out_counts, call);
      Sizes out_bytes = in_bytes(out_counts, size_, dtype);
      at::Tensor received = exchange(ins, in_bytes(in_counts, size_, dtype), out_bytes, call);
      int64_t start = 0;
      for (int i = 0; i < size_; ++i) {
        auto length = static_cast<int64_t>(out_bytes[i]);
        put(outs[i], received.narrow(0, start, length));
        start += length;
      }
    });
  }

  std::shared_ptr<Request> post_send(const at::Tensor& tensor, int destination, int64_t tag) override {
    Tensors bytes{bytes_at(tensor.const_data_ptr(), tensor.nbytes())};
    return post("send to ", bytes, destination, tag,
                [&] { return gloo_->send(bytes, destination, static_cast<int>(tag)); });
  }

  std::shared_ptr<Request> post_receive(const at::Tensor& tensor, int source, int64_t tag) override {
    Tensors bytes{bytes_at(tensor.data_ptr(), tensor.nbytes())};
    return post("receive from ", bytes, source, tag, [&] {
      return source == kAnySource ? gloo_->recvAnysource(bytes, static_cast<int>(tag))
                                  : gloo_->recv(bytes, source, static_cast<int>(tag));
    });
  }

  void abort(const std::string& reason) override {
    failure_->note(reason);
    if (islands_) islands_->abort(reason);
    if (agreement_) agreement_->abort();
    close_connections(*gloo_);
  }
  bool aborted() const override {
    return failure_->noted();
  }
  void leave() override {
    if (islands_) islands_->leave();
    if (agreement_) agreement_->leave();
    gloo_->shutdown();
  }
  uint64_t sequence() const override { return sequence_; }

 private:
  static void put(void* to, const at::Tensor& from) {
    if (from.nbytes() > 0) std::memcpy(to, from.const_data_ptr(), from.nbytes());
  }

  // Compares the call, then moves its data.
  template <typename Move>
  void collective(const Signature& signature, const Call& call, Move move) {
    guarded(signature, call, [&] {
      if (agreement_) agreement_->check(signature, call);
      move();
    });
  }

  template <typename Action>
  void guarded(const Signature& signature, const Call& call, Action action) {
    failure_->require_none();
    ++sequence_;
    try {
      action();
    } catch (const std::exception& error) {
      if (!agreement_) throw;  // of counterparts; the whole group says where it was
      abort(failure_->note(c10::str(failure_->name(rank_), " in ", describe(signature, call.text), ", collective ",
                                    sequence_.load(), " of a group that spans hosts"),
                           error));
      failure_->require_none();
    }
  }

  void sum_all(void* data, size_t count, DType dtype, Reduction reduction, double factor, const Call& call) {
    if (count > 0 && sums(dtype, reduction)) {
      by_gloo(data, count, dtype, reduction, call);
      return;
    }
    auto all = cut(data, count, dtype, size_, size_);
    scatter_sums(all.inputs(), all.counts.data(), all.data[rank_], dtype, reduction, factor, call);
    gather_all(all.data[rank_], all.outputs(), all.counts.data(), dtype, call);
  }

  void sum_with_comparison(const Reducer& reducer, const Signature& signature, void* data, double factor,
                           const Call& call) {
    const size_t bytes = signature.count * size_of(signature.dtype);
    Agreement::Comparison comparison(*agreement_, signature, call);
    comparison.post(data, bytes, factor);
    comparison.conclude();
    if (bytes == 0) return;
    std::vector<const void*> inputs;
    std::vector<double> factors;
    for (int i = 0; i < size_; ++i) {
      inputs.push_back(comparison.payload(i));
      factors.push_back(comparison.factor(i));
    }
    reducer(&data, 1, inputs.data(), size_, bytes, factors.data());
  }

  // Gloo wants equal sizes: shorter contributions are padded.
  void gather_all(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) {
    Sizes bytes = in_bytes(counts, size_, dtype);
    size_t most = *std::max_element(bytes.begin(), bytes.end());
    Tensors inputs{new_bytes(most)};
    put(inputs[0].data_ptr(), bytes_at(in, bytes[rank_]));
    std::vector<Tensors> outputs(1);
    for (int i = 0; i < size_; ++i) outputs[0].push_back(new_bytes(most));
    c10d::AllgatherOptions options;
    complete(call, options, [&] { return gloo_->allgather(outputs, inputs, options); });
    for (int i = 0; i < size_; ++i) put(outs[i], outputs[0][i].narrow(0, 0, static_cast<int64_t>(bytes[i])));
  }

  void scatter_sums(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                    double factor, const Call& call) {
    Reducer reducer(dtype, reduction, size_);
    auto factors = everyones(factor, reduction, call);
    size_t own = counts[rank_] * size_of(dtype);
    at::Tensor received = exchange(ins, in_bytes(counts, size_, dtype), Sizes(static_cast<size_t>(size_), own), call);
    std::vector<const void*> inputs;
    for (int i = 0; i < size_; ++i) inputs.push_back(received.data_ptr<uint8_t>() + static_cast<size_t>(i) * own);
    if (own > 0) reducer(&out, 1, inputs.data(), size_, own, factors.data());
  }

  // Of every pair what the one gives and the other takes; all members look at all, so that all of them raise.
  void compare_splits(const size_t* in_counts, const size_t* out_counts, const Call& call) {
    const auto size = static_cast<size_t>(size_);
    std::vector<uint64_t> own(in_counts, in_counts + size);
    own.insert(own.end(), out_counts, out_counts + size);
    std::vector<std::vector<uint64_t>> all(size, std::vector<uint64_t>(own.size()));
    std::vector<void*> outs;
    for (auto& each : all) outs.push_back(each.data());
    const Sizes counts(size, own.size());
    gather_all(own.data(), outs.data(), counts.data(), DType::U64, call);
    for (size_t from = 0; from < size; ++from) {
      for (size_t to = 0; to < size; ++to) {
        const uint64_t given = all[from][to], expected = all[to][size + from];
        if (given == expected) continue;
        throw Mismatch(c10::str(failure_->name(static_cast<int>(from)), " sends ", given, " elements to ",
                                failure_->name(static_cast<int>(to)), ", which expects ", expected,
                                "; input and output splits of each pair must agree"));
      }
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
    complete(call, options, [&] { return gloo_->allreduce(tensors, options); });
    if (reduction == Reduction::Average) average_sums(data, count, dtype, size_);
  }

  // ins[i] goes to member i; what comes from all members is returned in a row.
  at::Tensor exchange(const void* const* ins, const Sizes& in_sizes, const Sizes& out_sizes, const Call& call) {
    at::Tensor sent = new_bytes(total(in_sizes));
    at::Tensor received = new_bytes(total(out_sizes));
    auto* next = sent.data_ptr<uint8_t>();
    for (int i = 0; i < size_; ++i) {
      put(next, bytes_at(ins[i], in_sizes[i]));
      next += in_sizes[i];
    }
    std::vector<int64_t> in_splits(in_sizes.begin(), in_sizes.end());
    std::vector<int64_t> out_splits(out_sizes.begin(), out_sizes.end());
    c10d::AllToAllOptions options;
    complete(call, options, [&] { return gloo_->alltoall_base(received, sent, out_splits, in_splits, options); });
    return received;
  }

  std::vector<double> everyones(double factor, Reduction reduction, const Call& call) {
    std::vector<double> factors(static_cast<size_t>(size_), 1.0);
    if (reduction != Reduction::PremulSum) return factors;
    std::vector<void*> outs;
    for (auto& each : factors) outs.push_back(&each);
    Sizes counts(factors.size(), 1);
    gather_all(&factor, outs.data(), counts.data(), DType::F64, call);
    return factors;
  }

  template <typename Options, typename Start>
  static void complete(const Call& call, Options& options, Start start) {
    if (call.timeout.count() > 0) options.timeout = call.timeout;
    options.asyncOp = true;
    try {
      start()->wait();
    } catch (const std::exception& error) {
      throw CollectiveError(std::string("Gloo said: ") + error.what());
    }
  }

  template <typename Start>
  std::shared_ptr<Request> post(const char* what, Tensors& bytes, int peer, int64_t tag, Start start) {
    failure_->require_none();
    if (tag >= kNobodysTag) {
      throw std::invalid_argument(c10::str("tags of messages in a group that spans hosts go to ", kNobodysTag - 1));
    }
    if (peer == rank_) {
      throw std::invalid_argument("a rank of a group that spans hosts cannot send to itself: Gloo has no connection "
                                  "for it. Copy the tensor instead");
    }
    auto where = c10::str(failure_->name(rank_), " in a ", what, peer == kAnySource ? "anybody" : failure_->name(peer),
                          " (", bytes[0].nbytes(), " bytes, tag ", tag, ") of a group that spans hosts");
    try {
      auto work = start();
      return std::make_shared<GlooRequest>(work, bytes[0], gloo_->getBackendOptions()->timeout, failure_,
                                           std::move(where));
    } catch (const std::exception& error) {
      throw CollectiveError(failure_->note_message(where, error));
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::shared_ptr<Failure> failure_;  // the first one is what later calls report
  const std::unique_ptr<Agreement> agreement_;  // null for counterparts, who have agreed before
  const std::unique_ptr<Islands> islands_;  // null where no two members share a host
  const int rank_;
  const int size_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(c10::intrusive_ptr<c10d::Backend> gloo, std::shared_ptr<Failure> failure,
                                               std::unique_ptr<Agreement> agreement,
                                               std::unique_ptr<Islands> islands) {
  return std::make_unique<GlooTransport>(std::move(gloo), std::move(failure), std::move(agreement),
                                         std::move(islands));
}

}  // namespace opensmd
