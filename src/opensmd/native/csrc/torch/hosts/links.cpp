#include "torch/hosts/links.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/protocol/context.hpp"

namespace opensmd {

Links::Links(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int> members, std::vector<std::string> names,
             size_t most)
    : gloo_(std::move(gloo)), members_(std::move(members)), names_(std::move(names)) {
  own_ = static_cast<int>(std::find(members_.begin(), members_.end(), gloo_->getRank()) - members_.begin());
  const auto rows = static_cast<int64_t>(size()), width = static_cast<int64_t>(most);
  outgoing_ = at::empty({rows, width}, at::kByte);
  for (auto& rows_in : incoming_) rows_in = at::empty({rows, width}, at::kByte);
}

std::byte* Links::row(at::Tensor& rows, int index) const {
  return reinterpret_cast<std::byte*>(rows.data_ptr<uint8_t>() + index * rows.size(1));
}

void Links::expect(size_t parity) {
  receives_[parity].clear();
  for (int step = 1; step < size(); ++step) {
    std::vector<at::Tensor> into{incoming_[parity][other(step)]};
    receives_[parity].push_back(gloo_->recv(into, members_[static_cast<size_t>(other(step))], kFrameTag));
  }
}

void Links::post(const std::vector<size_t>& bytes) {
  if (posted_ == 0) expect(1);
  ++posted_;
  sends_.clear();
  for (int step = 1; step < size(); ++step) {
    const auto to = static_cast<size_t>(other(step));
    std::vector<at::Tensor> own{bytes_at(outgoing(other(step)), bytes[to])};
    sends_.push_back(gloo_->send(own, members_[to], kFrameTag));
  }
  expect(1 - parity());
}

void Links::wait(milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  const auto left = [&] {
    return std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()), milliseconds{1});
  };
  std::vector<std::string> missing;
  bool timed_out = false;
  for (int step = 1; step < size(); ++step) {
    try {
      // After one has timed out, Gloo waits for no other either.
      receives_[parity()][static_cast<size_t>(step - 1)]->wait(left());
    } catch (const std::exception&) {
      timed_out = timed_out || Clock::now() + milliseconds{1} >= deadline;
      missing.push_back(names_[static_cast<size_t>(other(step))]);
    }
  }
  if (timed_out) {
    throw TimedOut(c10::str("timed out after ", timeout.count(), " ms; not arrived: ", join_names(missing)));
  }
  if (!missing.empty()) throw PeerLost("lost the connection to " + join_names(missing));
  for (auto& send : sends_) send->wait(left());
}

}  // namespace opensmd
