#include "pipeline/split_backward.hpp"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string_view>
#include <typeinfo>
#include <unordered_set>

#include "pipeline/edges.hpp"

namespace opensmd {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
namespace generated = torch::autograd::generated;

using Nodes = std::unordered_set<Node*>;

// libtorch_python does not export the types of its nodes and hooks.
template <class T>
bool is_of_type(const T& object, std::string_view name) {
  return std::string_view(typeid(object).name()) == name;
}

bool is_python(const Node& node) { return is_of_type(node, "N5torch8autograd6PyNodeE"); }

bool is_hooked_before(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

// Whether the program would notice at what time a node runs. Hooks of torch's own belong to its reducer, which takes
// gradients whenever they come.
bool is_watched(Node& node) {
  if (is_hooked_before(node) || node.tensor_post_acc_grad_hooks() != nullptr) return true;
  return std::ranges::any_of(node.post_hooks(), [](const auto& hook) {
    return is_of_type(*hook, "N5torch8autograd18PyFunctionPostHookE");
  });
}

// A matrix product or convolution computes each of its gradients by itself, so that two calls, each for some of them,
// take no longer than one. What it has saved must be at hand: hooks that fetch it would run twice.
bool is_divisible(Node& node) {
  if (auto* addmm = dynamic_cast<generated::AddmmBackward0*>(&node)) {
    return !addmm->mat1_.has_hooks() && !addmm->mat2_.has_hooks();
  }
  if (auto* mm = dynamic_cast<generated::MmBackward0*>(&node)) {
    return !mm->self_.has_hooks() && !mm->mat2_.has_hooks();
  }
  if (auto* convolution = dynamic_cast<generated::ConvolutionBackward0*>(&node)) {
    return !convolution->input_.has_hooks() && !convolution->weight_.has_hooks();
  }
  return false;
}

// What a backward from some roots runs, and what of it leads to another rank.
class Graph {
 public:
  explicit Graph(const edge_list& roots) {
    for (const Edge& root : roots) visit(root.function.get());
  }

  bool has_python() const { return has_python_; }
  bool leads_away(const Edge& edge) const { return edge.is_valid() && leads_away_.contains(edge.function.get()); }
  // Successors before predecessors.
  const std::vector<Node*>& nodes() const { return nodes_; }

  std::vector<Node*> divisible() const {
    std::vector<Node*> found;
    for (Node* node : nodes_) {
      if (!leads_away_.contains(node)) continue;
      bool has_weights = false;
      for (const Edge& edge : node->next_edges()) has_weights |= edge.is_valid() && !leads_away(edge);
      if (has_weights && is_divisible(*node) && !is_hooked_before(*node) && node->post_hooks().empty()) {
        found.push_back(node);
      }
    }
    return found;
  }

 private:
  void visit(Node* root) {
    struct Step {
      Node* node;
      size_t next;
    };
    std::vector<Step> path;
    const auto enter = [&](Node* node) {
      if (seen_.insert(node).second) path.push_back({node, 0});
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < node->next_edges().size()) {
        const Edge& edge = node->next_edge(next++);
        if (edge.is_valid()) enter(edge.function.get());
        continue;
      }
      leave(node);
      path.pop_back();
    }
  }

  void leave(Node* node) {
    nodes_.push_back(node);
    has_python_ |= is_python(*node);
    bool away = sends_gradient(*node);
    for (const Edge& edge : node->next_edges()) away |= leads_away(edge);
    if (away) leads_away_.insert(node);
  }

  std::vector<Node*> nodes_;
  Nodes seen_;
  Nodes leads_away_;
  bool has_python_ = false;
};

// What is reached from `starts` along the edges for which follow(node, edge).
template <class Follow>
Nodes reached_from(const edge_list& starts, const Follow& follow) {
  Nodes reached;
  std::vector<Node*> ahead;
  const auto enter = [&](const Edge& edge) {
    if (edge.is_valid() && reached.insert(edge.function.get()).second) ahead.push_back(edge.function.get());
  };
  for (const Edge& start : starts) enter(start);
  while (!ahead.empty()) {
    Node* node = ahead.back();
    ahead.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (follow(node, edge)) enter(edge);
    }
  }
  return reached;
}

// Whether everything between a layer and its weights can wait: it is needed by nothing that does not wait, so that a
// weight's gradient is still added once, and nobody listens.
bool weights_can_wait(const Graph& graph, Node* layer, const Nodes& at_once) {
  edge_list weights;
  for (const Edge& edge : layer->next_edges()) {
    if (!graph.leads_away(edge)) weights.push_back(edge);
  }
  const Nodes between = reached_from(weights, [](Node*, const Edge&) { return true; });
  return std::ranges::none_of(between, [&](Node* node) { return at_once.contains(node) || is_watched(*node); });
}

// The layers whose weights can wait, and what the first part runs if they do.
struct Parts {
  Nodes layers;
  Nodes at_once;
};

// A layer that cannot wait may share weights with others, so these are asked again.
Parts divided(const Graph& graph, const edge_list& roots) {
  const auto divisible = graph.divisible();
  Nodes layers(divisible.begin(), divisible.end());
  for (;;) {
    Nodes at_once = reached_from(
        roots, [&](Node* node, const Edge& edge) { return !layers.contains(node) || graph.leads_away(edge); });
    if (std::erase_if(layers, [&](Node* layer) { return !weights_can_wait(graph, layer, at_once); }) == 0) {
      return {std::move(layers), std::move(at_once)};
    }
  }
}

// Keeps the gradient of a layer's output as it comes by.
struct Keep : torch::autograd::FunctionPreHook {
  explicit Keep(at::Tensor* place) : place(place) {}

  variable_list operator()(const variable_list& gradients) override {
    *place = gradients[0];
    return gradients;
  }

  at::Tensor* place;
};

// Edges that are out of the graph for as long as this lives.
class CutEdges {
 public:
  ~CutEdges() {
    for (auto& [edge, kept] : cut_) *edge = std::move(kept);
  }

  void cut(Edge& edge) {
    cut_.emplace_back(&edge, std::move(edge));
    edge = Edge();
  }

 private:
  std::vector<std::pair<Edge*, Edge>> cut_;
};

std::vector<PostponedLayer> postponed(const Graph& graph, const Nodes& layers) {
  std::vector<PostponedLayer> found;
  for (Node* node : graph.nodes()) {
    if (!layers.contains(node)) continue;
    PostponedLayer& layer = found.emplace_back();
    layer.layer = Edge(node->getptr(), 0);
    for (size_t index = 0; index < node->num_outputs(); ++index) {
      (graph.leads_away(node->next_edge(index)) ? layer.others : layer.weights).push_back(index);
    }
  }
  return found;
}

void execute(const edge_list& roots, const variable_list& gradients, bool keep_graph) {
  Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/true);
}

// Runs the backward up to the weights of `layers`, each of which gets the gradient of its output.
void run_without_weights(const edge_list& roots, const variable_list& gradients, std::vector<PostponedLayer>& layers) {
  CutEdges cut;
  for (auto& each : layers) {
    for (const size_t index : each.weights) cut.cut(each.layer.function->next_edges()[index]);
    each.layer.function->add_pre_hook(std::make_unique<Keep>(&each.gradient));
  }
  struct Unhook {
    std::vector<PostponedLayer>& layers;
    ~Unhook() {
      for (auto& each : layers) each.layer.function->pre_hooks().pop_back();
    }
  };
  const Unhook unhook{layers};
  execute(roots, gradients, /*keep_graph=*/true);
}

}  // namespace

void WeightBackward::run() {
  edge_list roots;
  variable_list gradients;
  CutEdges cut;
  for (auto& each : layers_) {
    if (!each.gradient.defined()) continue;
    for (const size_t index : each.others) cut.cut(each.layer.function->next_edges()[index]);
    roots.push_back(each.layer);
    gradients.push_back(std::move(each.gradient));
  }
  if (!roots.empty()) execute(roots, gradients, /*keep_graph=*/false);
  layers_.clear();
}

std::shared_ptr<WeightBackward> split_backward(const std::vector<at::Tensor>& roots,
                                               const std::vector<at::Tensor>& gradients) {
  if (torch::autograd::AnomalyMode::is_enabled()) return nullptr;
  edge_list edges;
  for (const at::Tensor& root : roots) {
    if (!root.requires_grad()) return nullptr;
    edges.push_back(torch::autograd::impl::gradient_edge(root));
  }
  const Graph graph(edges);
  if (graph.has_python()) return nullptr;
  const auto [layers, at_once] = divided(graph, edges);
  if (layers.empty()) return nullptr;
  auto waiting = postponed(graph, layers);
  run_without_weights(edges, gradients, waiting);
  for (Node* node : at_once) {
    if (!layers.contains(node)) node->release_variables();
  }
  return std::make_shared<WeightBackward>(std::move(waiting));
}

}  // namespace opensmd
