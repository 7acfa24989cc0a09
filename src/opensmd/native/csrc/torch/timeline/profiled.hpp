// What torch's profilers see of a sync call: what they see of an async one, and of any other backend's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <utility>
#include <vector>

namespace opensmd {

// Runs `run` and, if a profiler is active, shows it this title and these tensors' shapes.
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
