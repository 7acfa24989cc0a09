#include "torch/timeline/torch_calls.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "torch/backend.hpp"
#include "torch/timeline/call_log.hpp"
#include "torch/timeline/waited_work.hpp"

namespace opensmd {
namespace {

constexpr std::array kKeys{c10::DispatchKey::CPU, c10::DispatchKey::SparseCPU};

size_t bytes_in(const c10::IValue& value) {
  if (value.isTensor()) return bytes_of(value.toTensor());
  size_t all = 0;
  if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) all += bytes_in(each);
  }
  return all;
}

std::optional<size_t> group_argument(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() == "process_group") return i;
  }
  return std::nullopt;
}

// Whether calls of an operator are noted: messages are not, whose end nobody is told of.
bool is_collective(std::string_view name) {
  return name.starts_with("c10d::") && !name.starts_with("c10d::send") && !name.starts_with("c10d::recv");
}

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Notes the end of the call whose handle is last on the stack, if it has one.
void note_end(const c10::FunctionSchema& schema, torch::jit::Stack& stack, LoggedCall call) {
  const auto work = schema.returns().empty() ? nullptr : stack.back().toCustomClass<c10d::Work>();
  if (!work) return CallLog::of_process().end(std::move(call));
  if (const auto future = future_of(*work)) {
    future->addCallback([call = std::move(call)](c10::ivalue::Future&) { CallLog::of_process().end(call); },
                        /*uses_future=*/false);
    return;
  }
  c10::intrusive_ptr<c10d::Work> waited = c10::make_intrusive<WaitedWork>(work, std::move(call));
  stack.back() = c10::IValue(std::move(waited));
}

class LoggingKernel final : public c10::OperatorKernel {
 public:
  LoggingKernel(const c10::OperatorHandle& op, c10::DispatchKey key, size_t group_argument)
      : original_(op.getComputedKernelForDispatchKey(key)), group_argument_(group_argument) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto& arguments = torch::jit::last(*stack, schema.arguments().size());
    const auto group = arguments[group_argument_].toCustomClass<c10d::ProcessGroup>();
    const auto served_by = group->getBackend(c10::DeviceType::CPU)->getBackendName();
    if (served_by == kBackendName) return original_.callBoxed(op, keys, stack);  // which keeps its own record
    const auto& name = schema.name();
    const bool moves = name.find("barrier") == std::string::npos;
    auto call = CallLog::of_process().begin(group->getGroupName(), name.c_str(), moves ? bytes_in(arguments[0]) : 0);
    original_.callBoxed(op, keys, stack);
    note_end(schema, *stack, std::move(call));
  }

 private:
  const c10::SafeKernelFunction original_;
  const size_t group_argument_;
};

class SilentWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void replace_kernel(torch::Library& library, const c10::OperatorHandle& op, c10::DispatchKey key) {
  const auto group = group_argument(op.schema());
  if (!group || !op.hasKernelForDispatchKey(key)) return;
  auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<LoggingKernel>(op, key, *group));
  library.impl(op.operator_name().name.c_str(),
               torch::dispatch(key, torch::CppFunction::makeFromBoxedKernel(std::move(kernel))));
}

std::unique_ptr<torch::Library> replace_kernels() {
  SilentWarnings silent;  // torch warns of kernels that are replaced
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "c10d", std::nullopt, __FILE__, uint32_t{__LINE__});
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!is_collective(name.name)) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op) continue;
    for (const auto key : kKeys) replace_kernel(*library, *op, key);
  }
  return library;
}

struct Replaced {
  std::mutex mutex;
  std::unique_ptr<torch::Library> kernels;
};

Replaced& replaced() {
  static auto* state = new Replaced;  // never destroyed: other threads may be in a call when the process ends
  return *state;
}

}  // namespace

void log_calls_of_torch() {
  std::lock_guard lock(replaced().mutex);
  if (!replaced().kernels) replaced().kernels = replace_kernels();
}

void forget_calls_of_torch() {
  std::lock_guard lock(replaced().mutex);
  replaced().kernels.reset();
}

void log_device_calls(c10d::Backend& backend, std::string group) {
  backend.enableCollectivesTiming();
  backend.registerOnCompletionHook([group = group + "/cuda"](const std::shared_ptr<c10d::WorkInfo>& work) {
    using std::chrono::nanoseconds;
    const auto start = std::chrono::duration_cast<nanoseconds>(work->timeStarted.time_since_epoch()).count();
    const auto length = std::chrono::duration_cast<nanoseconds>(work->activeDuration).count();
    CallLog::of_process().add({group, c10d::opTypeToString(work->opType), work->seq, static_cast<uint64_t>(start),
                               static_cast<uint64_t>(start + length), 0});
  });
}

}  // namespace opensmd
