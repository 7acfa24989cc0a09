// What torch's profilers see of a sync call: what an async one's Work shows them, and that of every other backend.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <utility>
#include <vector>

namespace opensmd {

// Runs `run`, under this title and with the shapes of these tensors where somebody profiles.
template <typename Run>
void profiled(const char* title, at::TensorList tensors, Run&& run) {
  auto profilers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!profilers) return run();
  at::RecordFunction record(std::move(*profilers));
  record._setAsync();  // as torch's Work does, so that its time is not counted twice
  const std::vector<c10::IValue> shown(tensors.begin(), tensors.end());
  record.before(title, &shown);
  run();
}

}  // namespace opensmd
