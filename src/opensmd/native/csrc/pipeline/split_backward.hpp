// Backward in two parts: first the gradients that other ranks wait for, later those of weights, which only the
// optimizer needs. A pipeline rank computes the second part when it would otherwise be idle.
#pragma once

#include "pipeline/split_graph.hpp"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <mutex>
#include <vector>

namespace opensmd {

// A layer that computes its weights' gradients later, from the gradient of its output.
struct DividedLayer {
  torch::autograd::Edge layer;
  std::vector<size_t> weights, others;  // its edges
  at::Tensor gradient;
};

// A gradient at which the second part goes on from the first.
struct WaitingGradient {
  torch::autograd::Edge edge;
  at::Tensor gradient;
};

// The gradients of one backward in order of arrival, which is also the order in which the engine adds them up. Autograd
// has a thread per device, so a stage that computes on two devices adds from two threads.
class WaitingGradients {
 public:
  void add(torch::autograd::Edge edge, at::Tensor gradient);
  std::vector<WaitingGradient> take();

 private:
  std::mutex mutex_;
  std::vector<WaitingGradient> came_;
};

// The backward that begins at some roots. The graph and what it has saved live until both parts have run, or this is
// dropped. Run neither part with Python's lock held.
class SplitBackward {
 public:
  explicit SplitBackward(SplitGraph graph, std::vector<at::Tensor> gradients);
  ~SplitBackward();

  // Whether the first part adds to no weight's gradient, as far as can be known.
  bool leaves_everything() const;

  // Sends what leads to other ranks. Call once.
  void run_first();

  // Adds to the weights' gradients. Call once.
  void run_weights();

 private:
  void run_first_with(torch::autograd::edge_list roots, torch::autograd::variable_list gradients);

  std::unique_ptr<SplitGraph> graph_;
  std::vector<at::Tensor> gradients_;
  std::vector<DividedLayer> layers_;
  WaitingGradients waiting_;
};

// Null if nothing of the backward that begins at `roots` can wait: nothing leads to another rank, or the program would
// notice. Linear layers and convolutions run twice, each time for some of their gradients, which takes no longer; all
// other nodes wait unless they lead to another rank. `everything`: also nodes that cost nothing.
std::shared_ptr<SplitBackward> split_backward(const std::vector<at::Tensor>& roots,
                                              const std::vector<at::Tensor>& gradients, bool everything,
                                              const BeginsBackward& begins_backward);

// Whether backwards from the `legs` have no node in common, so that they can run one after the other. `weights_too`:
// nor a weight whose gradient they add to.
bool are_apart(const std::vector<std::vector<at::Tensor>>& legs, bool weights_too);

}  // namespace opensmd
