// Backward in two parts: first the gradients that other ranks wait for, later those of weights, which only the
// optimizer waits for. A rank of a pipeline that would stand idle at the end of a step computes the second part then.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <vector>

namespace opensmd {

// A layer whose weights' gradients are still to be computed, from the gradient of its output.
struct PostponedLayer {
  torch::autograd::Edge layer;
  std::vector<size_t> weights, others;  // its edges
  at::Tensor gradient;
};

// The second part. The graph and what it has saved live until it has run or is dropped.
class WeightBackward {
 public:
  explicit WeightBackward(std::vector<PostponedLayer> layers) : layers_(std::move(layers)) {}

  // Adds to the weights' gradients. Once; not with Python's lock held.
  void run();

 private:
  std::vector<PostponedLayer> layers_;
};

// Runs the backward that begins at `roots`, except for gradients of weights of linear layers and convolutions that a
// gradient for another rank passes through. Null, and nothing has run, if there are none, or if the graph has hooks or
// Python in it that would notice. Not with Python's lock held.
std::shared_ptr<WeightBackward> split_backward(const std::vector<at::Tensor>& roots,
                                               const std::vector<at::Tensor>& gradients);

}  // namespace opensmd
