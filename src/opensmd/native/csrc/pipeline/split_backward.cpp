#include "pipeline/split_backward.hpp"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace opensmd {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Keeps the gradient of a layer's output as it passes.
struct Keep : torch::autograd::FunctionPreHook {
  explicit Keep(at::Tensor* place) : place(place) {}

  variable_list operator()(const variable_list& gradients) override {
    *place = gradients[0];
    return gradients;
  }

  at::Tensor* place;
};

// Frees what a node has saved as soon as it has run, so that the rest of the backward can reuse the memory.
struct Release : torch::autograd::FunctionPostHook {
  explicit Release(Node* node) : node(node) {}

  variable_list operator()(const variable_list& gradients, const variable_list&) override {
    node->release_variables();
    return gradients;
  }

  Node* const node;
};

// Nodes that free what they have saved, while this lives.
class ReleasingNodes {
 public:
  ~ReleasingNodes() {
    for (auto& [node, hook] : hooked_) node->del_post_hook(hook);
  }

  void add(Node* node) { hooked_.emplace_back(node, node->add_post_hook(std::make_unique<Release>(node))); }

 private:
  std::vector<std::pair<Node*, std::uintptr_t>> hooked_;
};

// Stands at the end of an edge to something that waits, and takes its gradient.
struct Catch : Node {
  Catch(Edge target, WaitingGradients* waiting)
      : Node(edge_list()), target_(std::move(target)), waiting_(waiting) {
    input_metadata_.emplace_back(target_.function->input_metadata(target_.input_nr));
  }

  std::string name() const override { return "OpenSMDWaitingGradient"; }

  variable_list apply(variable_list&& gradients) override {
    if (gradients[0].defined()) waiting_->add(target_, std::move(gradients[0]));
    return {};
  }

  const Edge target_;
  WaitingGradients* const waiting_;
};

// Edges that lead elsewhere while this lives.
class ChangedEdges {
 public:
  ~ChangedEdges() {
    for (auto& [edge, kept] : changed_) *edge = std::move(kept);
  }

  void cut(Edge& edge) { lead(edge, Edge()); }

  void lead(Edge& edge, Edge elsewhere) {
    changed_.emplace_back(&edge, std::move(edge));
    edge = std::move(elsewhere);
  }

 private:
  std::vector<std::pair<Edge*, Edge>> changed_;
};

std::vector<DividedLayer> layers_of(const SplitGraph& graph) {
  std::vector<DividedLayer> layers;
  for (Node* node : graph.nodes) {
    if (!graph.divided.contains(node)) continue;
    DividedLayer& layer = layers.emplace_back();
    layer.layer = Edge(node->getptr(), 0);
    for (size_t index = 0; index < node->num_outputs(); ++index) {
      (graph.leads_away(node->next_edge(index)) ? layer.others : layer.weights).push_back(index);
    }
  }
  return layers;
}

edge_list edges_of(const std::vector<at::Tensor>& roots) {
  edge_list edges;
  for (const at::Tensor& root : roots) edges.push_back(torch::autograd::impl::gradient_edge(root));
  return edges;
}

void execute(const edge_list& roots, const variable_list& gradients, bool keep_graph) {
  Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace

void WaitingGradients::add(Edge edge, at::Tensor gradient) {
  const std::lock_guard lock(mutex_);
  came_.push_back({std::move(edge), std::move(gradient)});
}

std::vector<WaitingGradient> WaitingGradients::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(came_, {});
}

SplitBackward::SplitBackward(SplitGraph graph, std::vector<at::Tensor> gradients)
    : graph_(std::make_unique<SplitGraph>(std::move(graph))), gradients_(std::move(gradients)),
      layers_(layers_of(*graph_)) {}

SplitBackward::~SplitBackward() = default;

// Python code may run a nested backward, as a reentrant checkpoint does.
bool SplitBackward::leaves_everything() const { return !graph_->adds_at_once && !graph_->has_python; }

void SplitBackward::run_first() {
  edge_list roots;
  variable_list gradients;
  for (size_t index = 0; index < gradients_.size(); ++index) {
    const Edge& root = graph_->roots[index];
    if (graph_->waits(root)) {
      waiting_.add(root, gradients_[index]);
    } else {
      roots.push_back(root);
      gradients.push_back(gradients_[index]);
    }
  }
  run_first_with(std::move(roots), std::move(gradients));
  gradients_.clear();
  graph_.reset();
}

// Each divided layer receives the gradient of its output; gradients for anything else that waits are caught.
void SplitBackward::run_first_with(edge_list roots, variable_list gradients) {
  ChangedEdges changed;
  for (auto& each : layers_) {
    for (const size_t index : each.weights) changed.cut(each.layer.function->next_edges()[index]);
    each.layer.function->add_pre_hook(std::make_unique<Keep>(&each.gradient));
  }
  struct Unhook {
    std::vector<DividedLayer>& layers;
    ~Unhook() {
      for (auto& each : layers) each.layer.function->pre_hooks().pop_back();
    }
  };
  const Unhook unhook{layers_};
  ReleasingNodes releasing;
  for (Node* node : graph_->nodes) {
    if (!graph_->away.contains(node) && !graph_->at_once.contains(node)) continue;
    // The engine frees nothing itself if it is to keep the divided layers. Nodes that accumulate into a weight save
    // nothing.
    if (!layers_.empty() && !graph_->divided.contains(node) && !is_weight(*node)) releasing.add(node);
    for (Edge& edge : node->next_edges()) {
      if (graph_->waits(edge)) changed.lead(edge, Edge(c10::make_intrusive<Catch>(edge, &waiting_), 0));
    }
  }
  execute(roots, gradients, /*keep_graph=*/!layers_.empty());
}

void SplitBackward::run_weights() {
  edge_list roots;
  variable_list gradients;
  ChangedEdges changed;
  for (auto& each : layers_) {
    if (!each.gradient.defined()) continue;
    for (const size_t index : each.others) changed.cut(each.layer.function->next_edges()[index]);
    roots.push_back(each.layer);
    gradients.push_back(std::move(each.gradient));
  }
  for (auto& each : waiting_.take()) {
    roots.push_back(std::move(each.edge));
    gradients.push_back(std::move(each.gradient));
  }
  if (!roots.empty()) execute(roots, gradients, /*keep_graph=*/false);
  layers_.clear();
}

std::shared_ptr<SplitBackward> split_backward(const std::vector<at::Tensor>& roots,
                                              const std::vector<at::Tensor>& gradients, bool everything,
                                              const BeginsBackward& begins_backward) {
  if (torch::autograd::AnomalyMode::is_enabled()) return nullptr;
  if (!std::ranges::all_of(roots, [](const at::Tensor& root) { return root.requires_grad(); })) return nullptr;
  SplitGraph graph(edges_of(roots), everything, begins_backward);
  if (!graph.is_split()) return nullptr;
  return std::make_shared<SplitBackward>(std::move(graph), gradients);
}

bool are_apart(const std::vector<std::vector<at::Tensor>>& legs, bool weights_too) {
  Nodes seen;
  for (const auto& leg : legs) {
    Nodes reached;
    std::vector<Node*> ahead;
    const auto enter = [&](const Edge& edge) {
      if (edge.is_valid() && reached.insert(edge.function.get()).second) ahead.push_back(edge.function.get());
    };
    for (const Edge& root : edges_of(leg)) enter(root);
    while (!ahead.empty()) {
      Node* node = ahead.back();
      ahead.pop_back();
      if (seen.contains(node) && (weights_too || !is_weight(*node) || is_watched(*node))) return false;
      for (const Edge& edge : node->next_edges()) enter(edge);
    }
    seen.merge(reached);
  }
  return true;
}

}  // namespace opensmd
