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

#include "core/timeline/event_log.hpp"
#include "torch/backend.hpp"
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

bool is_message(std::string_view name) { return name.starts_with("c10d::send") || name.starts_with("c10d::recv"); }

c10::intrusive_ptr<c10::ivalue::Future> future_of(c10d::Work& work) {
  try {
    return work.getFuture();
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Notes the end of the call whose handle is last on the stack, if there is one. Messages have no future.
void note_end(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const Event& event, bool message) {
  const auto work = schema.returns().empty() ? nullptr : stack.back().toCustomClass<c10d::Work>();
  if (!work) return EventLog::of_process().end(event);
  if (const auto future = message ? nullptr : future_of(*work)) {
    future->addCallback([event](c10::ivalue::Future&) { EventLog::of_process().end(event); }, /*uses_future=*/false);
    return;
  }
  c10::intrusive_ptr<c10d::Work> waited = c10::make_intrusive<WaitedWork>(work, event);
  stack.back() = c10::IValue(std::move(waited));
}

class RecordingKernel final : public c10::OperatorKernel {
 public:
  RecordingKernel(const c10::OperatorHandle& op, c10::DispatchKey key, size_t group_argument)
      : original_(op.getComputedKernelForDispatchKey(key)),
        group_argument_(group_argument),
        operation_(EventLog::of_process().operation(op.schema().name())),
        message_(is_message(op.schema().name())),
        moves_(op.schema().name().find("barrier") == std::string::npos),
        has_peer_(message_ && op.schema().arguments()[group_argument + 1].name() != "tag") {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto& arguments = torch::jit::last(*stack, schema.arguments().size());
    const auto group = arguments[group_argument_].toCustomClass<c10d::ProcessGroup>();
    const auto served_by = group->getBackend(c10::DeviceType::CPU)->getBackendName();
    if (served_by == kBackendName) return original_.callBoxed(op, keys, stack);  // it keeps its own record
    Event event = begin(*group, arguments);
    original_.callBoxed(op, keys, stack);
    note_end(schema, *stack, event, message_);
  }

 private:
  Event begin(c10d::ProcessGroup& group, c10::ArrayRef<c10::IValue> arguments) const {
    const size_t bytes = moves_ ? bytes_in(arguments[0]) : 0;
    Event event = message_ ? EventLog::of_process().begin_message(group.getGroupName(), operation_, bytes)
                           : EventLog::of_process().begin(group.getGroupName(), operation_, bytes);
    if (has_peer_) event.peer = static_cast<int32_t>(arguments[group_argument_ + 1].toInt());
    return event;
  }

  const c10::SafeKernelFunction original_;
  const size_t group_argument_;
  const uint32_t operation_;
  const bool message_;
  const bool moves_;
  const bool has_peer_;  // the argument after the group's: a message from any source has none
};

class SilentWarnings final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void replace_kernel(torch::Library& library, const c10::OperatorHandle& op, c10::DispatchKey key) {
  const auto group = group_argument(op.schema());
  if (!group || !op.hasKernelForDispatchKey(key)) return;
  auto kernel = c10::BoxedKernel::makeFromFunctor(std::make_unique<RecordingKernel>(op, key, *group));
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
    if (!name.name.starts_with("c10d::")) continue;
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
  static auto* state = new Replaced;  // never destroyed: other threads may be in a call at exit
  return *state;
}

}  // namespace

void record_calls_of_torch() {
  std::lock_guard lock(replaced().mutex);
  if (!replaced().kernels) replaced().kernels = replace_kernels();
}

void leave_calls_of_torch() {
  std::lock_guard lock(replaced().mutex);
  replaced().kernels.reset();
}

void record_device_calls(c10d::Backend& backend, uint32_t group) {
  backend.enableCollectivesTiming();
  backend.registerOnCompletionHook([group](const std::shared_ptr<c10d::WorkInfo>& work) {
    using std::chrono::nanoseconds;
    Event event;
    event.group = group;
    event.operation = EventLog::of_process().operation(c10d::opTypeToString(work->opType));
    event.sequence = work->seq;
    event.start_ns = static_cast<uint64_t>(
        std::chrono::duration_cast<nanoseconds>(work->timeStarted.time_since_epoch()).count());
    event.end_ns = event.start_ns + static_cast<uint64_t>(
                                        std::chrono::duration_cast<nanoseconds>(work->activeDuration).count());
    EventLog::of_process().add(event);
  });
}

}  // namespace opensmd
