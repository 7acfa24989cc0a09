// Members on several hosts: bytes travel through torch's Gloo, sums are made here by the core's kernels.
//
// Gloo sees only messages of raw bytes, so dtypes, reductions and shapes that it refuses work all the same, and results
// have the same bits on all ranks: each element is added up either by one member or by all in the same way. The
// collectives are in levels/. This file counts calls and reports failures.
#include "torch/hosts/gloo_transport.hpp"

#include <ATen/ATen.h>

#include <chrono>
#include <numeric>
#include <utility>

#include "core/algorithms/counts.hpp"
#include "torch/hosts/failure.hpp"
#include "torch/hosts/late_waits.hpp"
#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/two_sums.hpp"
#include "torch/hosts/messages/gloo_request.hpp"
#include "torch/hosts/messages/host_messages.hpp"
#include "torch/hosts/messages/message_ends.hpp"
#include "torch/tensors.hpp"

namespace opensmd {
namespace {

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
  GlooTransport(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
                std::shared_ptr<Wire> wire, std::shared_ptr<Failure> failure, Layout layout,
                std::shared_ptr<Local> local, Thresholds thresholds)
      : gloo_(std::move(gloo)),
        failure_(std::move(failure)),
        layout_(std::move(layout)),
        apart_(layout_.apart()),
        local_(std::move(local)),
        wire_(std::move(wire)),
        agreement_(local_, *wire_, layout_, thresholds.carried),
        thresholds_(thresholds),
        ends_(std::move(store), layout_),
        messages_(host_messages()),
        late_(looking(&Failure::look_for_failure), looking(&Failure::look_closer)) {}

  // A comparison is itself a barrier.
  void barrier(const Call& call) override {
    const auto signature = signature_of(Operation::Barrier, DType::Byte, 0);
    guarded(signature, call, [&] { agreement_.check(signature, call); });
  }

  void all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor,
                  const Call& call) override {
    auto on = levels_for(dtype, reduction);
    const auto signature = signature_of(Operation::AllReduce, dtype, count, -1, reduction);
    // Over a tree, narrow floats would be rounded once per host; and sums made in one step would all go to the root.
    const bool may = on.framed && !levels::is_narrow(dtype) && levels::TwoSums::serve(dtype, reduction);
    const bool by_tree = may && count * size_of(dtype) >= thresholds_.tree_from;
    guarded(signature, call, [&] {
      by_tree ? over_a_tree(on, signature, call, data, factor) : levels::all_reduce(on, {signature, call}, data, factor);
    });
  }

  void all_reduce_compressed(float* data, size_t count, Reduction reduction, Compression compression, float* residual,
                             const Call& call) override {
    auto on = levels();
    auto signature = signature_of(Operation::AllReduce, DType::F32, count, -1, reduction);
    signature.shape_hash = static_cast<uint64_t>(compression);
    guarded(signature, call,
            [&] { levels::all_reduce_compressed(on, {signature, call}, data, compression, residual); });
  }

  void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
              const Call& call) override {
    auto on = levels_for(dtype, reduction);
    const auto signature = signature_of(Operation::Reduce, dtype, count, root, reduction);
    guarded(signature, call, [&] { levels::reduce(on, {signature, call}, in, out, factor); });
  }

  void broadcast(void* data, size_t count, DType dtype, int root, const Call& call) override {
    auto on = levels();
    const auto signature = signature_of(Operation::Broadcast, dtype, count, root);
    guarded(signature, call, [&] { levels::broadcast(on, {signature, call}, data); });
  }

  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) override {
    auto on = levels();
    const auto signature = signature_of_counts(Operation::AllGather, dtype, counts);
    guarded(signature, call, [&] { levels::all_gather(on, {signature, call}, in, outs, counts); });
  }

  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) override {
    auto on = levels();
    const auto signature = signature_of(Operation::Gather, dtype, count, root);
    guarded(signature, call, [&] { levels::gather(on, {signature, call}, in, outs); });
  }

  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) override {
    auto on = levels();
    const auto signature = signature_of(Operation::Scatter, dtype, count, root);
    guarded(signature, call, [&] { levels::scatter(on, {signature, call}, ins, out); });
  }

  void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                      double factor, const Call& call) override {
    auto on = levels_for(dtype, reduction);
    auto signature = signature_of_counts(Operation::ReduceScatter, dtype, counts);
    signature.reduction = reduction;
    guarded(signature, call, [&] { levels::reduce_scatter(on, {signature, call}, ins, counts, out, factor); });
  }

  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype, const Call& call) override {
    auto on = levels();
    const auto count = std::accumulate(in_counts, in_counts + layout_.size(), size_t{0});
    const auto signature = signature_of(Operation::AllToAll, dtype, count);
    guarded(signature, call,
            [&] { levels::all_to_all(on, {signature, call}, ins, in_counts, outs, out_counts); });
  }

  std::shared_ptr<Request> post_send(const at::Tensor& tensor, int destination, int64_t tag) override {
    const Posting posting{true, tensor, destination, tag, moved_as(tensor.scalar_type()).dtype};
    require_possible(posting);
    return messages_ ? messages_->post_send(posting) : send_on_wire(posting);
  }

  std::shared_ptr<Request> post_receive(const at::Tensor& tensor, int source, int64_t tag) override {
    const Posting posting{false, tensor, source, tag, moved_as(tensor.scalar_type()).dtype};
    require_possible(posting);
    return messages_ ? messages_->post_receive(posting) : receive_on_wire(posting);
  }

  std::shared_ptr<Group> local() const override { return local_->group(); }
  int member_at(int place) const override { return layout_.here()[static_cast<size_t>(place)]; }

  void abort(const std::string& reason) override { failure_->end(reason); }
  bool aborted() const override { return failure_->noted(); }
  void leave() override {
    local_->leave();
    gloo_->shutdown();
  }

 private:
  levels::Levels levels() { return levels(layout_, *local_, true); }
  levels::Levels levels(const Layout& layout, Local& local, bool framed) {
    const Thresholds& at = thresholds_;
    return {layout, local, *wire_, agreement_, framed, at.ring_from, at.turns_from, at.least_part, at.piece};
  }

  // Reductions that two steps would round twice are made in one, as if no members shared a host.
  levels::Levels levels_for(DType dtype, Reduction reduction) {
    static_cast<void>(Reducer(dtype, reduction, layout_.size()));  // throws where there is no such reduction
    if (local_->alone() && layout_.hosts() == layout_.size()) return levels();
    return levels::TwoSums::serve(dtype, reduction) ? levels() : levels(apart_, alone_, false);
  }

  static void over_a_tree(levels::Levels& on, Signature signature, const Call& call, void* data, double factor) {
    signature.root = 0;
    signature.operation = Operation::Reduce;
    levels::reduce(on, {signature, call}, data, on.layout.member() == 0 ? data : nullptr, factor);
    signature.operation = Operation::Broadcast;
    levels::broadcast(on, {signature, call}, data);
  }

  Signature signature_of_counts(Operation operation, DType dtype, const size_t* counts) const {
    auto signature = signature_of(operation, dtype, std::accumulate(counts, counts + layout_.size(), size_t{0}));
    signature.shape_hash = hash_of_counts(counts, layout_.size());
    return signature;
  }

  std::string where(const Signature& signature, const Call& call) const {
    return c10::str(failure_->name(gloo_->getRank()), " in ", describe(signature, call.text), ", collective ",
                    sequence_.load(), " of a group that spans hosts");
  }

  template <typename Action>
  void guarded(const Signature& signature, const Call& call, Action action) {
    failure_->require_none();
    ++sequence_;
    failure_->note_call(sequence_, signature, call.text);
    late_.begin();
    try {
      action();
      late_.end();
    } catch (const std::exception& error) {
      late_.end();
      abort(failure_->note(where(signature, call), error));
      failure_->require_none();
    }
  }

  void require_possible(const Posting& posting) const {
    failure_->require_none();
    if (posting.tag >= kTagLimit) {
      throw std::invalid_argument(c10::str("tags of messages in a group that spans hosts go to ", kFirstQuietTag - 1));
    }
    if (posting.peer == gloo_->getRank()) {
      throw std::invalid_argument("a rank of a group that spans hosts cannot send to itself: Gloo has no connection "
                                  "for it. Copy the tensor instead");
    }
  }

  std::unique_ptr<HostMessages> host_messages() {
    if (local_->alone()) return nullptr;
    return std::make_unique<HostMessages>(
        local_->group(), layout_, [this](const Posting& posting) { return send_on_wire(posting); },
        [this](const Posting& posting) { return receive_on_wire(posting); },
        [gloo = gloo_, failure = failure_, local = local_](const Posting& posting, const std::exception& error) {
          if (!local->group()->aborted()) return;  // only the message was wrong
          failure->end(failure->note(where_of(posting, *gloo, *failure), error));
          failure->require_none();
        });
  }

  std::shared_ptr<Request> send_on_wire(const Posting& posting) {
    const at::Tensor bytes = bytes_at(posting.tensor.const_data_ptr(), posting.tensor.nbytes());
    return post(bytes, posting, [&] { return wire_->send(bytes, posting.peer, wire_tag(posting)); });
  }

  std::shared_ptr<Request> receive_on_wire(const Posting& posting) {
    const at::Tensor bytes = bytes_at(posting.tensor.data_ptr(), posting.tensor.nbytes());
    return post(bytes, posting, [&] { return wire_->receive(bytes, posting.peer, wire_tag(posting)); });
  }

  static bool is_quiet(const Posting& posting) { return !posting.sends && posting.tag >= kFirstQuietTag; }

  static int wire_tag(const Posting& posting) {
    return tag_on_wire(posting.tag, posting.tensor.nbytes(), posting.dtype);
  }

  LateWaits::Look looking(void (Failure::*look)()) const {
    return [of_group = std::weak_ptr<Failure>(failure_), look] {
      const auto failure = of_group.lock();
      if (!failure) return;
      try {
        (*failure.*look)();
      } catch (const std::exception&) {
        // The store does not answer; the call that waits has a timeout.
      }
    };
  }

  static std::string where_of(const Posting& posting, c10d::Backend& gloo, const Failure& failure) {
    return c10::str(failure.name(gloo.getRank()), posting.sends ? " in a send to " : " in a receive from ",
                    posting.peer == kAnySource ? "anybody" : failure.name(posting.peer), " (", posting.tensor.nbytes(),
                    " bytes of ", name_of(posting.dtype), ", tag ", posting.tag, ") of a group that spans hosts");
  }

  template <typename Start>
  std::shared_ptr<Request> post(const at::Tensor& bytes, const Posting& posting, Start start) {
    failure_->require_none();
    auto where = where_of(posting, *gloo_, *failure_);
    try {
      auto end = ends_.add(posting);
      auto work = start();
      return std::make_shared<GlooRequest>(
          wire_, failure_, std::move(work), gloo_->getBackendOptions()->timeout,
          GlooRequest::Message{posting.peer, std::move(where), is_quiet(posting), bytes, std::move(end)});
    } catch (const std::exception& error) {
      if (is_quiet(posting)) throw CollectiveError(where + ": " + error.what());
      throw CollectiveError(failure_->note_message(where, posting.peer, error));
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::shared_ptr<Failure> failure_;  // the first one is what later calls report
  const Layout layout_;
  const Layout apart_;
  const std::shared_ptr<Local> local_;
  Local alone_;
  const std::shared_ptr<Wire> wire_;
  Agreement agreement_;
  const Thresholds thresholds_;
  MessageEnds ends_;
  const std::unique_ptr<HostMessages> messages_;  // if members share hosts
  LateWaits late_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(c10::intrusive_ptr<c10d::Backend> gloo, int connections,
                                               c10::intrusive_ptr<c10d::Store> store,
                                               std::vector<std::vector<int>> hosts, std::shared_ptr<Group> local,
                                               const std::vector<std::string>& names, Thresholds thresholds) {
  Layout layout(std::move(hosts), gloo->getRank());
  auto here = local ? std::make_shared<Local>(std::move(local)) : std::make_shared<Local>();
  auto wire = std::make_shared<Wire>(gloo, connections, names);
  auto interrupt = [wire, here](const std::string& reason) {
    here->abort(reason);
    wire->close();
  };
  auto failure = std::make_shared<Failure>(wire, store, std::move(interrupt));
  return std::make_unique<GlooTransport>(std::move(gloo), std::move(store), std::move(wire), std::move(failure),
                                         std::move(layout), std::move(here), thresholds);
}

}  // namespace opensmd
