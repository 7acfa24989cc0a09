// What torch's profilers see of calls. torch's own Work writes its end into the profile in which it began, even if that
// is over, its memory freed, and another's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace opensmd {

// What one call shows to the profilers that are active when it begins: its title and these tensors' shapes.
class Profiled {
 public:
  Profiled(const char* title, at::TensorList tensors) {
    auto profilers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!profilers) return;
    profile_ = c10::ThreadLocalDebugInfo::current();
    record_.emplace(std::move(*profilers));
    record_->_setAsync();  // as for any backend, whichever thread ends it, so that its time is not counted twice
    const std::vector<c10::IValue> shown(tensors.begin(), tensors.end());
    record_->before(title, &shown);
  }
  ~Profiled() { end(); }
  Profiled(const Profiled&) = delete;
  Profiled& operator=(const Profiled&) = delete;

  // In any thread. Nothing happens if it has ended, or if the profile has.
  void end() {
    if (!record_) return;
    auto own = c10::ThreadLocalDebugInfo::current();
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(profile_.lock());  // torch does nothing without a profile
    record_.reset();
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(own));
  }

 private:
  std::weak_ptr<c10::ThreadLocalDebugInfo> profile_;
  std::optional<at::RecordFunction> record_;
};

}  // namespace opensmd
