#include "pipeline/split_graph.hpp"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_function.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>

#include "pipeline/edges.hpp"

namespace opensmd {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
namespace generated = torch::autograd::generated;

namespace {

// libtorch_python does not export the types of its nodes and hooks.
template <class T>
bool is_of_type(const T& object, std::string_view name) {
  return std::string_view(typeid(object).name()) == name;
}

// Of exactly this class: runs for every node of every graph, where a failed dynamic_cast takes too long.
template <class T>
const T* exactly(const Node& node) {
  return typeid(node) == typeid(T) ? static_cast<const T*>(&node) : nullptr;
}

bool is_python(const Node& node) { return is_of_type(node, "N5torch8autograd6PyNodeE"); }

bool is_hooked_before(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

// The node of a tensor written in place through a view. It holds the node of what was written, and compares that node's
// edges with its own when it runs, so none of them may be redirected.
bool has_fixed_edges(const Node& node) { return typeid(node) == typeid(torch::autograd::CopySlices); }

constexpr size_t kUsualSize = 256;  // of a stage's graph

enum class Halves { kNone, kTwo, kOnceOnly };

template <class... Saved>
Halves halves_of(const Saved&... saved) {
  return (saved.has_hooks() || ...) ? Halves::kOnceOnly : Halves::kTwo;
}

// A matrix product or convolution computes each of its gradients separately, so two calls, each for some of them, take
// no longer than one. What it saved must be available: hooks that fetch it, as for a checkpoint, would run twice.
Halves halves(const Node& node) {
  if (auto* addmm = exactly<generated::AddmmBackward0>(node)) return halves_of(addmm->mat1_, addmm->mat2_);
  if (auto* mm = exactly<generated::MmBackward0>(node)) return halves_of(mm->self_, mm->mat2_);
  if (auto* bmm = exactly<generated::BmmBackward0>(node)) return halves_of(bmm->self_, bmm->mat2_);
  if (auto* baddbmm = exactly<generated::BaddbmmBackward0>(node)) {
    return halves_of(baddbmm->batch1_, baddbmm->batch2_);
  }
  if (auto* convolution = exactly<generated::ConvolutionBackward0>(node)) {
    return halves_of(convolution->input_, convolution->weight_);
  }
  return Halves::kNone;
}

}  // namespace

bool is_weight(const Node& node) { return typeid(node) == typeid(torch::autograd::AccumulateGrad); }

// Whether the program would notice when a node runs. Torch's own hooks belong to its reducer, which takes gradients
// whenever they come.
bool is_watched(Node& node) {
  if (is_hooked_before(node) || node.tensor_post_acc_grad_hooks() != nullptr) return true;
  return std::ranges::any_of(node.post_hooks(), [](const auto& hook) {
    return is_of_type(*hook, "N5torch8autograd18PyFunctionPostHookE");
  });
}

SplitGraph::SplitGraph(edge_list starts, bool everything, const BeginsBackward& begins_backward)
    : roots(std::move(starts)) {
  Nodes seen;
  seen.reserve(kUsualSize);
  away.reserve(kUsualSize);
  nodes.reserve(kUsualSize);
  for (const Edge& root : roots) visit(root.function.get(), seen, begins_backward);
  divide(everything);
}

void SplitGraph::visit(Node* root, Nodes& seen, const BeginsBackward& begins_backward) {
  struct Step {
    Node* node;
    size_t next;
  };
  std::vector<Step> path;
  const auto enter = [&](Node* node) {
    if (seen.insert(node).second) path.push_back({node, 0});
  };
  enter(root);
  while (!path.empty()) {
    auto& [node, next] = path.back();
    if (next < node->next_edges().size()) {
      const Edge& edge = node->next_edge(next++);
      if (edge.is_valid()) enter(edge.function.get());
      continue;
    }
    leave(node, begins_backward);
    path.pop_back();
  }
}

void SplitGraph::leave(Node* node, const BeginsBackward& begins_backward) {
  nodes.push_back(node);
  bool leads = sends_gradient(*node);
  if (is_python(*node)) {
    has_python = true;
    const std::string name = node->name();
    leads |= name == "_ReceiveBackward";  // the edges of transports without a mailbox
    // A nested backward, as begun by reentrant checkpoints, reaches whatever its function has used.
    leads |= begins_backward(static_cast<const torch::autograd::PyNode&>(*node).pyobj());
    compiled_ |= name == "CompiledFunctionBackward";
  }
  once_only_ |= halves(*node) == Halves::kOnceOnly;
  for (const Edge& edge : node->next_edges()) leads |= leads_away(edge);
  if (leads) away.insert(node);
}

// Whether a layer has a second half, none of which has to run at once. A compiled function refuses to run in a graph
// that is kept for a second half.
bool SplitGraph::can_be_divided(Node* node) const {
  if (compiled_ || halves(*node) != Halves::kTwo || is_hooked_before(*node) || !node->post_hooks().empty()) {
    return false;
  }
  bool has_weights = false;
  for (const Edge& edge : node->next_edges()) {
    if (!edge.is_valid() || leads_away(edge)) continue;
    has_weights = true;
    if (at_once.contains(edge.function.get())) return false;
  }
  return has_weights;
}

void SplitGraph::divide(bool everything) {
  if (away.empty()) return;
  do {
    divided.clear();
    for (Node* node : nodes) {
      if (away.contains(node) && can_be_divided(node)) divided.insert(node);
    }
  } while (hold_at_once(everything));
  for (Node* node : nodes) {
    const bool off_the_way = !away.contains(node);
    waiting |= off_the_way && !at_once.contains(node);
    adds_at_once |= at_once.contains(node) && is_weight(*node);
  }
}

// The second part waits for no gradient.
bool SplitGraph::must_run_at_once(Node* node) const {
  if (is_watched(*node) || takes_gradient(*node) || (is_python(*node) && node->name() == "_SendBackward")) return true;
  return std::ranges::any_of(node->next_edges(), [this](const Edge& edge) {
    return edge.is_valid() && at_once.contains(edge.function.get());
  });
}

// Moves nodes off the way into the first part; returns whether there were any. A weight whose gradient the first part
// computes anyway takes it at once, unless the second part adds to it, too: it is added as a whole. And if something in
// the graph can be fetched only once, nothing reachable from such a node waits, as behind fixed edges.
bool SplitGraph::hold_at_once(bool everything) {
  const size_t before = at_once.size();
  Nodes of_second;
  for (Node* node : nodes) {
    if (away.contains(node)) {
      if (!divided.contains(node)) continue;
    } else if (at_once.contains(node)) {
      continue;
    } else if (must_run_at_once(node)) {
      at_once.insert(node);
      continue;
    }
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid()) of_second.insert(edge.function.get());
    }
  }
  const auto take = [&](Node* node) {
    for (const Edge& edge : node->next_edges()) {
      if (!waits(edge)) continue;
      Node* next = edge.function.get();
      if (once_only_ || has_fixed_edges(*node) || (!everything && is_weight(*next) && !of_second.contains(next))) {
        at_once.insert(next);
      }
    }
  };
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    if (at_once.contains(*node) || (away.contains(*node) && !divided.contains(*node))) take(*node);
  }
  if (once_only_) {
    for (const Edge& root : roots) {
      if (waits(root)) at_once.insert(root.function.get());
    }
  }
  return at_once.size() != before;
}

}  // namespace opensmd
