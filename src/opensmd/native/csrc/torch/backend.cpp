// The life of a group: creation, splitting, memory for tensors, abort, shutdown, fork.
#include <Python.h>

#include "torch/backend.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/protocol/clock.hpp"
#include "core/timeline/event_log.hpp"

namespace opensmd {
namespace {

// A caller that waits for the queue's thread must not hold the GIL, which callbacks of futures in that thread may need.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace

SmddpBackend::SmddpBackend(std::unique_ptr<Transport> transport, std::string name, int rank, int size,
                           c10::intrusive_ptr<SmddpOptions> options, Makers makers)
    : Backend(rank, size),
      transport_(std::move(transport)),
      name_(std::move(name)),
      unclaimed_(transport_->local() ? std::make_shared<Unclaimed>(transport_->local()) : nullptr),
      options_(std::move(options)),
      makers_(std::move(makers)),
      timeout_(options_->timeout) {
  init();
}

SmddpBackend::~SmddpBackend() { release_resources(); }

// Runs when nobody uses the group any more; the one that it was split from may refer to it for longer.
void SmddpBackend::release_resources() {
  if (!transport_) return;
  if (process_.is_forked()) {
    // The parent still uses the arena: the child must release nothing in its name.
    queue_->forget_thread();
    static_cast<void>(transport_.release());
    return;
  }
  try {
    shutdown();
  } catch (const std::exception&) {
    // From a device whose work has failed. Callers that want the error use destroy_process_group.
  }
  // Both may wait for threads that drop their last work, and its Python objects.
  WithoutGil without_gil;
  unclaimed_.reset();
  transport_.reset();
  device_backend_.reset();
  makers_ = {};
}

// A copy, because torch writes the new group's name into it when it splits a group.
c10::intrusive_ptr<c10d::Backend::Options> SmddpBackend::getBackendOptions() {
  auto copy = c10::make_intrusive<SmddpOptions>(*options_);
  copy->timeout = timeout_;
  return copy;
}

void SmddpBackend::require_usable() const {
  process_.require_not_forked();
  TORCH_CHECK(!closed_, "smddp: this process group was shut down (destroy_process_group); make a new one");
}

void SmddpBackend::shutdown() {
  process_.require_not_forked();
  if (closed_.exchange(true)) return;
  WithoutGil without_gil;
  queue_->drain();
  transport_->leave();
  std::lock_guard lock(device_mutex_);
  if (device_backend_ && !device_aborted_) device_backend_->shutdown();
}

void SmddpBackend::abort() { abort(c10::str("abort() was called on ", name_)); }

void SmddpBackend::abort(const std::string& reason) {
  process_.require_not_forked();
  WithoutGil without_gil;
  transport_->abort(reason);
  std::lock_guard lock(device_mutex_);
  device_aborted_ = true;
  if (device_backend_) device_backend_->abort();
}

c10d::ErrorType SmddpBackend::getError() {
  if (transport_->aborted()) return c10d::ErrorType::COMM_ERROR;
  WithoutGil without_gil;
  std::lock_guard lock(device_mutex_);
  return device_backend_ ? device_backend_->getError() : c10d::ErrorType::SUCCESS;
}

void SmddpBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  if (const auto group = transport_->shared()) group->set_timeout(timeout);  // for direct users
  std::lock_guard lock(device_mutex_);
  if (device_backend_) device_backend_->setTimeout(timeout);
}

BackendPtr SmddpBackend::split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                               const c10::intrusive_ptr<Options>& opts) {
  require_usable();
  auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  auto options = c10::dynamic_intrusive_pointer_cast<SmddpOptions>(opts);
  if (!options) options = c10::make_intrusive<SmddpOptions>(opts ? opts->timeout : timeout_.load());
  if (opts) options->group_name = opts->group_name;
  auto made = split_.lock();
  if (!made || split_name_ != options->group_name) {
    made = makers_.split(store, static_cast<int>(found - ranks.begin()), ranks, options);
    split_name_ = options->group_name;
    split_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
  }
  return made;
}

void SmddpBackend::record_as(uint32_t group) {
  if (const auto shared = transport_->shared()) return shared->record_as(group);
  timeline_group_ = group;
}

std::function<void()> SmddpBackend::recorded(const char* title, const Tensors& outputs, uint64_t sequence,
                                             std::function<void()> run) const {
  Event event;
  for (const auto& tensor : outputs) event.bytes += bytes_of(tensor);
  event.group = timeline_group_;
  event.operation = EventLog::of_process().operation(title);
  event.sequence = sequence;
  return [event, run = std::move(run)]() mutable {
    event.start_ns = now_ns();  // it may have waited for others of its group
    run();
    EventLog::of_process().end(event);
  };
}

// ---------------------------------------------------------------- CUDA

BackendPtr SmddpBackend::device_backend() {
  require_usable();
  TORCH_CHECK_WITH(DistBackendError, !transport_->aborted(),
                   "smddp: this process group has failed or was aborted, which ended it for tensors of every device; "
                   "destroy it and make a new one");
  WithoutGil without_gil;  // the maker takes it while the lock is held
  std::lock_guard lock(device_mutex_);
  if (!device_backend_) {
    device_backend_ = makers_.device_backend();
    device_backend_->setGroupUid(getGroupUid());
    device_backend_->setGroupDesc(getGroupDesc());
    device_backend_->setBoundDeviceId(bound_device_id_);
  }
  std::lock_guard coalescing_lock(coalescing_mutex_);
  if (coalescing_ && !std::exchange(device_coalescing_, true)) device_backend_->startCoalescing();
  return device_backend_;
}

// NCCL waits without limit for members that do not connect, so all meet before they first do. Messages skip this: they
// connect two members, and the others may send none.
BackendPtr SmddpBackend::device_collectives() {
  BackendPtr backend = device_backend();
  if (met_on_device_) return backend;
  WithoutGil without_gil;
  std::lock_guard lock(meeting_mutex_);
  if (!met_on_device_) makers_.meet_on_device();
  met_on_device_ = true;
  return backend;
}

void SmddpBackend::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cpu()) device_collectives()->eagerConnectSingleDevice(device);
}

std::shared_ptr<c10::Allocator> SmddpBackend::getMemAllocator() { return device_backend()->getMemAllocator(); }

// ---------------------------------------------------------------- coalescing

// There is nothing to gain on the CPU; for CUDA, torch sends batches of messages this way.
bool SmddpBackend::supportsCoalescing() const { return at::hasCUDA(); }

void SmddpBackend::startCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  coalesced_.clear();  // left by a batch that failed: torch does not end it here
  coalescing_ = true;
}

WorkPtr SmddpBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  BackendPtr device;
  {
    std::lock_guard lock(coalescing_mutex_);
    TORCH_CHECK(coalescing_, "smddp: endCoalescing() was called without startCoalescing()");
    coalescing_ = false;
    works = std::exchange(coalesced_, {});
    if (std::exchange(device_coalescing_, false)) device = device_backend_;
  }
  if (device) {
    auto work = device->endCoalescing();  // without the lock: NCCL may wait for members to connect
    if (works.empty()) return work;
    if (work) works.push_back(work);
  }
  return c10::make_intrusive<WorkList>(rank_, std::move(works));
}

// Remembers works issued between startCoalescing and endCoalescing.
WorkPtr SmddpBackend::note(WorkPtr work) {
  std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

std::vector<std::pair<int, MemberState>> SmddpBackend::lost_members() const {
  std::vector<std::pair<int, MemberState>> found;
  const auto group = transport_->local();
  for (int place = 0; group && place < group->size(); ++place) {
    const MemberState state = group->status(place).state;
    const bool lost = state == MemberState::Dead || state == MemberState::Replaced || state == MemberState::Left;
    if (lost) found.emplace_back(transport_->member_at(place), state);
  }
  return found;
}

// ---------------------------------------------------------------- memory for tensors

// torch asks with the index of a device: -1 stands for the CPU.
bool SmddpBackend::supportsTensorAlloc(c10::DeviceIndex index) {
  if (index < 0) return transport_->local() != nullptr;
  return at::hasCUDA() && device_backend()->supportsTensorAlloc(index);
}

// torch's reducer takes buckets of complex parameters for pairs of real numbers, and makes them so itself, except where
// the memory comes from here. On a device they lie where torch's default puts them: NCCL's memory needs connected
// members, and a model may be wrapped earlier.
at::Tensor SmddpBackend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return at::empty({size}, options);
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  if (!c10::isComplexType(dtype)) return allocate(size, options);
  return allocate(2 * size, options.dtype(c10::toRealValueType(dtype)));
}

at::Tensor SmddpBackend::allocate(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) {
    // Before members are connected NCCL has no memory to give; this, too, costs only speed.
    return met_on_device_ ? device_backend()->allocateTensor(size, options) : at::empty({size}, options);
  }
  require_usable();
  auto group = transport_->local();
  size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  void* block = group && bytes > 0 ? group->heap_allocate(bytes) : nullptr;
  // A full heap costs speed, not correctness.
  if (block == nullptr) return at::empty({size}, options);
  // Hooks may pad a bucket with resize_, which then moves to memory of its own.
  return at::for_blob(block, {size})
      .deleter([group, block](void*) { group->heap_free(block); })
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetAllocator(c10::kCPU))
      .make_tensor();
}

}  // namespace opensmd
