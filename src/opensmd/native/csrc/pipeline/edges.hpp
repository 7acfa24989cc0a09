// Where autograd crosses from one rank to another. A sent tensor gets a token on the sender and one on the receiver;
// backward begins at all tokens of a rank's part of the graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>

#include <functional>
#include <memory>
#include <utility>

#include "pipeline/tensor_mailbox.hpp"

namespace opensmd {

// The way back of a gradient: from or to `member`, with `tag`, or with `missing` if there is none.
struct Return {
  std::shared_ptr<TensorMailbox> mailbox;
  int member;
  int64_t tag;
  int64_t missing;
};

// The token of a sent tensor. Its gradient arrives in backward; if it is not there yet, `expect` is called, and returns
// once the gradient, or word that there is none, has come.
at::Tensor send_edge(const at::Tensor& sent, Return way, std::function<void()> expect);

// A received tensor as part of the graph, and its token. In backward its gradient goes back.
std::pair<at::Tensor, at::Tensor> receive_edge(const at::Tensor& received, Return way);

// Whether backwards have found a gradient for this received tensor's token that none has sent back.
bool keeps_gradient(const at::Tensor& token);

// Whether a node of the graph sends a gradient to another rank, or takes one from there.
bool sends_gradient(const torch::autograd::Node& node);
bool takes_gradient(const torch::autograd::Node& node);

}  // namespace opensmd
