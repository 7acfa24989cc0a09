// Which nodes of a backward can wait, and where to cut it: the analysis behind split_backward.
#pragma once

#include <torch/csrc/python_headers.h>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <unordered_set>
#include <vector>

namespace opensmd {

using Nodes = std::unordered_set<torch::autograd::Node*>;

// Whether a node's Python function begins a nested backward when the node runs. Called without Python's lock.
using BeginsBackward = std::function<bool(PyObject* function)>;

bool is_weight(const torch::autograd::Node& node);
bool is_watched(torch::autograd::Node& node);

// What a backward from some roots runs, and which of it leads to another rank:
//
//   root ── layer ── layer ── received        these lead away: they run first
//             │        └── T ── weight        off the way: they wait, with the layers' own second half
//             └── mul ── custom ── weight
//
// A node off the way cannot wait if anything observes it or a node behind it.
struct SplitGraph {
  SplitGraph(torch::autograd::edge_list roots, bool everything, const BeginsBackward& begins_backward);

  bool leads_away(const torch::autograd::Edge& edge) const {
    return edge.is_valid() && away.contains(edge.function.get());
  }
  bool waits(const torch::autograd::Edge& edge) const {
    return edge.is_valid() && !away.contains(edge.function.get()) && !at_once.contains(edge.function.get());
  }
  bool is_split() const { return !divided.empty() || waiting; }

  torch::autograd::edge_list roots;
  std::vector<torch::autograd::Node*> nodes;  // successors before predecessors
  Nodes away, at_once, divided;  // at_once: off the way, but in the first part
  bool waiting = false;  // something off the way waits
  bool has_python = false;
  bool adds_at_once = false;  // the first part adds to a weight's gradient

 private:
  void visit(torch::autograd::Node* root, Nodes& seen, const BeginsBackward& begins_backward);
  void leave(torch::autograd::Node* node, const BeginsBackward& begins_backward);
  void divide(bool everything);
  bool must_run_at_once(torch::autograd::Node* node) const;
  bool can_be_divided(torch::autograd::Node* node) const;
  bool hold_at_once(bool everything);

  bool once_only_ = false;  // some node has saved what another part must not fetch again
  bool compiled_ = false;
};

}  // namespace opensmd
