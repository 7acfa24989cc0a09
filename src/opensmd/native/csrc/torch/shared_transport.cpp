// All members on one host: every call goes straight to the core.
#include "torch/transport.hpp"

#include <utility>

#include "torch/tensors.hpp"

namespace opensmd {
namespace {

DType dtype_of(const at::Tensor& tensor) { return moved_as(tensor.scalar_type()).dtype; }

class SharedTransport final : public Transport {
 public:
  explicit SharedTransport(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  void barrier(const Call& call) override { group_->barrier(call); }
  void all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor,
                  const Call& call) override {
    group_->all_reduce(data, count, dtype, reduction, factor, call);
  }
  void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
              const Call& call) override {
    group_->reduce(in, out, count, dtype, reduction, root, factor, call);
  }
  void broadcast(void* data, size_t count, DType dtype, int root, const Call& call) override {
    group_->broadcast(data, count, dtype, root, call);
  }
  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) override {
    group_->all_gather(in, outs, counts, dtype, call);
  }
  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) override {
    group_->gather(in, outs, count, dtype, root, call);
  }
  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) override {
    group_->scatter(ins, out, count, dtype, root, call);
  }
  void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                      double factor, const Call& call) override {
    group_->reduce_scatter(ins, counts, out, dtype, reduction, factor, call);
  }
  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype, const Call& call) override {
    group_->all_to_all(ins, in_counts, outs, out_counts, dtype, call);
  }

  std::shared_ptr<Request> post_send(const at::Tensor& tensor, int destination, int64_t tag) override {
    return group_->post_send(tensor.const_data_ptr(), tensor.nbytes(), destination, tag, dtype_of(tensor));
  }
  std::shared_ptr<Request> post_receive(const at::Tensor& tensor, int source, int64_t tag) override {
    return group_->post_receive(tensor.data_ptr(), tensor.nbytes(), source, tag, dtype_of(tensor));
  }

  void abort(const std::string& reason) override { group_->abort(reason); }
  bool aborted() const override { return group_->aborted(); }
  void leave() override { group_->leave(); }
  std::shared_ptr<Group> shared() const override { return group_; }

 private:
  std::shared_ptr<Group> group_;
};

}  // namespace

std::unique_ptr<Transport> make_shared_transport(std::shared_ptr<Group> group) {
  return std::make_unique<SharedTransport>(std::move(group));
}

}  // namespace opensmd
