#include "pipeline/tensor_mailbox.hpp"

#include <ATen/ATen.h>

#include <chrono>

namespace opensmd {
namespace {

constexpr int64_t kOwnTags = int64_t{1} << 40;  // torch's are 32 bits wide
constexpr size_t kRemembered = 4096;  // latest sent messages, for a chart of the last step

int64_t own(int64_t tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag < kOwnTags, "a tag must be between 0 and ", kOwnTags - 1, ", got ", tag);
  return kOwnTags + tag;
}

}  // namespace

TensorMailbox::TensorMailbox(const c10::intrusive_ptr<SmddpBackend>& backend)
    : group_(backend->shared_group()), blocks_(group_) {}

void TensorMailbox::note(int destination, int64_t tag) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  std::lock_guard lock(mutex_);
  sent_.emplace_back(std::chrono::nanoseconds(now).count(), destination, tag);
  if (sent_.size() > kRemembered) sent_.pop_front();
}

std::vector<TensorMailbox::Sent> TensorMailbox::sent() {
  std::lock_guard lock(mutex_);
  return {sent_.begin(), sent_.end()};
}

void TensorMailbox::send(int destination, int64_t tag, const at::Tensor& tensor) {
  note(destination, tag);
  at::AutoDispatchBelowADInplaceOrView plain;  // a backward must record none of this
  const at::Tensor data = tensor.resolve_conj().resolve_neg().contiguous();
  if (data.nbytes() < kBlockBytes) return post(destination, tag, data);
  std::optional<Place> place;
  {
    std::lock_guard lock(mutex_);
    with_torch_errors([&] { place = blocks_.put(data); });
  }
  const Place announced = place.value_or(Place{-1, static_cast<int64_t>(data.nbytes())});
  post(destination, tag, at::tensor(c10::ArrayRef<int64_t>(announced.data(), announced.size())));
  if (!place) post(destination, tag, data);
}

void TensorMailbox::post(int destination, int64_t tag, const at::Tensor& data) {
  std::shared_ptr<Request> request;
  with_torch_errors([&] { request = group_->post_send(data.const_data_ptr(), data.nbytes(), destination, own(tag)); });
  std::lock_guard lock(mutex_);
  forget_what_left();
  if (!request->done()) leaving_.push_back({std::move(request), data});
}

bool TensorMailbox::ready(int source, int64_t tag) {
  bool has_come = false;
  with_torch_errors([&] { has_come = group_->ready(source, own(tag)); });
  std::lock_guard lock(mutex_);
  forget_what_left();
  return has_come;
}

at::Tensor TensorMailbox::receive(int source, int64_t tag, int64_t count, at::ScalarType dtype, milliseconds timeout) {
  return arriving(source, tag, {count}, {}, dtype, timeout);
}

std::optional<at::Tensor> TensorMailbox::take(int source, int64_t tag, at::IntArrayRef sizes, at::IntArrayRef strides,
                                              at::ScalarType dtype) {
  if (!ready(source, tag)) return std::nullopt;
  return arriving(source, tag, sizes, strides, dtype, {});
}

at::Tensor TensorMailbox::arriving(int source, int64_t tag, at::IntArrayRef sizes, at::IntArrayRef strides,
                                   at::ScalarType dtype, milliseconds timeout) {
  at::AutoDispatchBelowADInplaceOrView plain;
  const int64_t count = c10::multiply_integers(sizes);
  const auto bytes = static_cast<size_t>(count) * c10::elementSize(dtype);
  if (bytes >= kBlockBytes) {
    Place place;
    receive_into(place.data(), sizeof(place), source, tag, timeout);
    TORCH_CHECK_WITH(DistBackendError, place[1] == static_cast<int64_t>(bytes), "the message from rank ", source,
                     " with tag ", tag, " has ", place[1], " bytes, the receiver expected ", bytes);
    if (place[0] >= 0) {
      const at::Tensor elements = borrowed(group_, source, place, count, dtype);
      return strides.empty() ? elements.view(sizes) : elements.as_strided(sizes, strides);
    }
  }
  at::Tensor received = strides.empty() ? at::empty(sizes, at::TensorOptions(dtype))
                                        : at::empty_strided(sizes, strides, at::TensorOptions(dtype));
  receive_into(received.data_ptr(), bytes, source, tag, timeout);
  return received;
}

void TensorMailbox::receive_into(void* data, size_t bytes, int source, int64_t tag, milliseconds timeout) {
  with_torch_errors([&] { group_->post_receive(data, bytes, source, own(tag))->wait(timeout); });
}

size_t TensorMailbox::wait_any(Wanted wanted, milliseconds timeout) {
  for (auto& [source, tag] : wanted) tag = own(tag);
  {
    std::lock_guard lock(mutex_);
    forget_what_left();
  }
  size_t index = 0;
  with_torch_errors([&] { index = group_->wait_ready(wanted, timeout); });
  return index;
}

void TensorMailbox::flush(milliseconds timeout) {
  for (;;) {
    Leaving first;
    {
      std::lock_guard lock(mutex_);
      if (leaving_.empty()) return;
      first = std::move(leaving_.front());
      leaving_.pop_front();
    }
    with_torch_errors([&] { first.request->wait(timeout); });
  }
}

void TensorMailbox::forget_what_left() {
  while (!leaving_.empty() && leaving_.front().request->done()) leaving_.pop_front();
}

}  // namespace opensmd
