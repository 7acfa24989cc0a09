#include "pipeline/edges.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>

namespace opensmd {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class Sent : public Node {
 public:
  Sent(const at::Tensor& tensor, Return way, std::function<void()> expect)
      : Node(torch::autograd::collect_next_edges(tensor)), way_(std::move(way)), expect_(std::move(expect)),
        sizes_(tensor.sizes().vec()), dtype_(tensor.scalar_type()) {}

  std::string name() const override { return "OpenSMDSent"; }

  variable_list apply(variable_list&&) override {
    auto gradient = take();
    if (!gradient && !missing()) {
      expect_();
      gradient = take();
    }
    if (gradient) return {*gradient};
    way_.mailbox->receive(way_.member, way_.missing, 1, at::kByte);
    return {at::Tensor()};
  }

 private:
  std::optional<at::Tensor> take() const { return way_.mailbox->take(way_.member, way_.tag, sizes_, {}, dtype_); }
  bool missing() const { return way_.mailbox->ready(way_.member, way_.missing); }

  const Return way_;
  const std::function<void()> expect_;
  const std::vector<int64_t> sizes_;
  const at::ScalarType dtype_;
};

class Received : public Node {
 public:
  explicit Received(Return way) : Node(torch::autograd::edge_list()), way_(std::move(way)) {}

  std::string name() const override { return "OpenSMDReceived"; }

  // A backward of the step also begins at the token. One nested in it (a reentrant checkpoint whose function uses the
  // tensor without taking it) does not: what it finds waits for the step's, as the sender takes one gradient.
  variable_list apply(variable_list&& gradients) override {
    if (gradients[0].defined()) early_ = early_.defined() ? early_ + gradients[0] : gradients[0];
    if (!gradients[1].defined()) return {};
    if (early_.defined()) {
      way_.mailbox->send(way_.member, way_.tag, early_);
      early_.reset();
    } else {
      way_.mailbox->send(way_.member, way_.missing, at::zeros({1}, at::kByte));
    }
    return {};
  }

  bool keeps_gradient() const { return early_.defined(); }

 private:
  const Return way_;
  at::Tensor early_;
};

at::Tensor token(const at::Tensor& like, const c10::intrusive_ptr<Node>& node) {
  at::Tensor token;
  {
    at::AutoDispatchBelowADInplaceOrView plain;
    token = at::empty({0}, like.options());
  }
  torch::autograd::set_history(token, node);
  return token;
}

}  // namespace

at::Tensor send_edge(const at::Tensor& sent, Return way, std::function<void()> expect) {
  return token(sent, c10::make_intrusive<Sent>(sent, std::move(way), std::move(expect)));
}

std::pair<at::Tensor, at::Tensor> receive_edge(const at::Tensor& received, Return way) {
  auto node = c10::make_intrusive<Received>(std::move(way));
  at::Tensor mine;
  {
    at::AutoDispatchBelowADInplaceOrView plain;
    mine = received.detach();  // no view of the message's memory: the program may write into it
  }
  torch::autograd::set_history(mine, node);
  return {mine, token(received, node)};
}

bool keeps_gradient(const at::Tensor& token) {
  const auto* node = dynamic_cast<const Received*>(token.grad_fn().get());
  return node != nullptr && node->keeps_gradient();
}

bool sends_gradient(const Node& node) { return typeid(node) == typeid(Received); }

bool takes_gradient(const Node& node) { return typeid(node) == typeid(Sent); }

}  // namespace opensmd
