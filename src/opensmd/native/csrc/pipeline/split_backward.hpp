// Backward in two parts: first the gradients that other ranks wait for, later those of weights, which only the
// optimizer waits for. A rank of a pipeline that would stand idle computes the second part then.
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

// A gradient where the second part goes on from what the first has run.
struct WaitingGradient {
  torch::autograd::Edge edge;
  at::Tensor gradient;
};

// Those of one backward, in the order in which they came, which is the one in which the engine itself adds them up.
// Autograd has a thread for each device, so that those of a stage that computes on two come from two threads.
class WaitingGradients {
 public:
  void add(torch::autograd::Edge edge, at::Tensor gradient);
  std::vector<WaitingGradient> take();

 private:
  std::mutex mutex_;
  std::vector<WaitingGradient> came_;
};

// The backward that begins at some roots. The graph and what it has saved live until both parts have run, or it is
// dropped. Neither part with Python's lock held.
class SplitBackward {
 public:
  explicit SplitBackward(SplitGraph graph, std::vector<at::Tensor> gradients);
  ~SplitBackward();

  // Whether the first part adds to no weight's gradient, for all that can be known.
  bool leaves_everything() const;

  // Sends what leads to other ranks. Once.
  void run_first();

  // Adds to the weights' gradients. Once.
  void run_weights();

 private:
  void run_first_with(torch::autograd::edge_list roots, torch::autograd::variable_list gradients);

  std::unique_ptr<SplitGraph> graph_;
  std::vector<at::Tensor> gradients_;
  std::vector<DividedLayer> layers_;
  WaitingGradients waiting_;
};

// Null if nothing of the backward that begins at `roots` can wait: nothing leads to another rank, or the program would
// notice. Linear layers and convolutions run twice, each time for some of their gradients, which takes no longer; of
// all other nodes those wait that do not lead to another rank. `everything`: also what costs nothing.
std::shared_ptr<SplitBackward> split_backward(const std::vector<at::Tensor>& roots,
                                              const std::vector<at::Tensor>& gradients, bool everything,
                                              const BeginsBackward& begins_backward);

// Whether backwards from each of `legs` run no node twice, so that they can run one after the other.
// `weights_too`: nor add to the same weight's gradient.
bool are_apart(const std::vector<std::vector<at::Tensor>>& legs, bool weights_too);

}  // namespace opensmd
