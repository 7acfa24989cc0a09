#include "torch/hosts/wire.hpp"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <utility>

namespace opensmd {
namespace {

constexpr int kStreams = 2;
constexpr int kSmallTagBits = 14, kKindBits = 15;

uint64_t mixed(uint64_t bits) { return bits * 0x9e3779b97f4a7c15u >> 20; }

// A profiled message of torch's notes its end in the profile in which it began, even if that profile is over and its
// memory is another's. Receives are posted ahead, so some end after any profile.
class Unprofiled {
 public:
  Unprofiled() {
    if (at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) guard_.emplace();  // it costs some 300 ns
  }

 private:
  std::optional<at::DisableRecordFunctionGuard> guard_;
};

}  // namespace

Wire::WorkPtr Wire::send(at::Tensor data, int member, int tag) const {
  const Unprofiled unprofiled;
  std::vector<at::Tensor> from{std::move(data)};
  return gloo_->send(from, member, tag);
}

Wire::WorkPtr Wire::receive(at::Tensor into, int member, int tag) const {
  const Unprofiled unprofiled;
  std::vector<at::Tensor> to{std::move(into)};
  return member == kAnySource ? gloo_->recvAnysource(to, tag) : gloo_->recv(to, member, tag);
}

// Gloo throws at once when asked to send over a closed connection.
bool Wire::is_lost(int member) const {
  const at::Tensor nothing = at::empty({1}, at::kByte);
  try {
    for (int i = 0; i < connections_; ++i) send(nothing, member, kNobodysTag + i);
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

void Wire::end_lost_waits() {
  std::map<int, bool> lost;
  waits_.end_where([&](int member) {
    const auto known = lost.find(member);
    return known != lost.end() ? known->second : (lost[member] = is_lost(member));
  });
}

// Gloo's abort() leaves connections open, and its destructor waits for calls in progress. But a receive that times out
// closes all connections its tag leads to. All waits must have ended before their messages can no longer be sent.
void Wire::close() {
  const at::Tensor nothing = at::empty({1}, at::kByte);
  for (int i = 0; i < (size() - 1) * connections_; ++i) {
    try {
      const int member = (rank() + 1 + i / connections_) % size();
      receive(nothing, member, kNobodysTag + i % connections_)->wait(milliseconds{1});
    } catch (const std::exception&) {
      // Expected; or this connection was already closed, but others may not be.
    }
  }
  waits_.end();
}

bool says_kind(int64_t tag) { return tag >> kSmallTagBits == 0; }

int tag_on_wire(int64_t tag, size_t bytes, DType dtype) {
  if (!says_kind(tag)) return static_cast<int>(tag);
  constexpr uint64_t kKinds = 1u << kKindBits;
  const auto of_dtype = static_cast<uint64_t>(dtype == DType::U8 ? DType::Byte : dtype);
  const auto kind = static_cast<int>(mixed(mixed(bytes) + of_dtype) % kKinds);
  return kTagLimit + (kind << kSmallTagBits) + static_cast<int>(tag);
}

at::Tensor bytes_at(const void* data, size_t bytes) {
  // Gloo only reads what it sends, but torch has no read-only tensors.
  if (bytes == 0) return at::empty({0}, at::kByte);
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

Crossing::Crossing(Wire& wire, const Call& call, uint64_t digest)
    : wire_(wire), digest_(digest), timeout_(call.timeout), deadline_(std::chrono::steady_clock::now() + call.timeout) {}

int Crossing::tag_of(Stream stream, size_t bytes, int from, int to) const {
  constexpr uint64_t kTags = (kNobodysTag - kFirstCallTag) / (kStreams * kWays);
  const auto of_call = static_cast<int>((digest_ ^ mixed(bytes)) % kTags);
  return kFirstCallTag + (of_call * kStreams + static_cast<int>(stream)) * kWays + way(from, to, bytes);
}

size_t Crossing::receive(void* data, size_t bytes, int member, Stream stream) {
  receives_.push_back({nullptr, member});
  if (bytes > 0) {
    receives_.back().work =
        wire_.receive(bytes_at(data, bytes), member, tag_of(stream, bytes, member, wire_.rank()));
  }
  return receives_.size() - 1;
}

size_t Crossing::send(const void* data, size_t bytes, int member, Stream stream) {
  sends_.push_back({nullptr, member});
  if (bytes > 0) {
    sends_.back().work = wire_.send(bytes_at(data, bytes), member, tag_of(stream, bytes, wire_.rank(), member));
  }
  return sends_.size() - 1;
}

void Crossing::await(Message& message, const char* missing) {
  if (!message.work) return;
  using Clock = std::chrono::steady_clock;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
  try {
    wire_.wait(std::exchange(message.work, nullptr), message.member, std::max(left, milliseconds{1}));
  } catch (const std::exception&) {
    const auto& name = wire_.name(message.member);
    if (Clock::now() + milliseconds{1} < deadline_) throw PeerLost("lost the connection to " + name);
    throw TimedOut(c10::str("timed out after ", timeout_.count(), " ms; ", missing, name));
  }
}

void Crossing::await_all_sent() {
  for (size_t i = 0; i < sends_.size(); ++i) await_sent(i);
}

}  // namespace opensmd
