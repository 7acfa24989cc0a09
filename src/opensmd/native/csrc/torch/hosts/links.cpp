#include "torch/hosts/links.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/protocol/context.hpp"

namespace opensmd {

// Its abort() leaves connections open, and its destructor waits for calls under way. But a receive that times out
// closes all of them.
void close_connections(c10d::Backend& gloo) {
  at::Tensor nothing = at::empty({1}, at::kByte);
  for (int i = 1; i < gloo.getSize(); ++i) {
    try {
      std::vector<at::Tensor> into{nothing};
      gloo.recv(into, (gloo.getRank() + i) % gloo.getSize(), kNobodysTag)->wait(milliseconds{1});
    } catch (const std::exception&) {
      // As was to be; or this connection was closed before, but others may not be.
    }
  }
}

Links::Links(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<std::string> names)
    : gloo_(std::move(gloo)), names_(std::move(names)), rank_(gloo_->getRank()), size_(gloo_->getSize()) {}

const std::byte* Links::frame(int member) const {
  return reinterpret_cast<const std::byte*>(frames_.const_data_ptr<uint8_t>()) + member * frames_.size(1);
}

std::byte* Links::prepare(size_t most) {
  const auto width = static_cast<int64_t>(most);
  if (!frames_.defined() || frames_.size(1) != width) frames_ = at::zeros({size_, width}, at::kByte);
  return reinterpret_cast<std::byte*>(frames_.data_ptr<uint8_t>() + rank_ * width);
}

void Links::post(size_t bytes) {
  receives_.clear();
  sends_.clear();
  // Gloo sends data only to who has said that it waits for them: that goes first.
  for (int i = 1; i < size_; ++i) {
    const int source = (rank_ + i) % size_;
    std::vector<at::Tensor> row{frames_[source]};
    receives_.push_back(gloo_->recv(row, source, kFrameTag));
  }
  for (int i = 1; i < size_; ++i) {
    std::vector<at::Tensor> own{frames_[rank_].narrow(0, 0, static_cast<int64_t>(bytes))};
    sends_.push_back(gloo_->send(own, (rank_ + i) % size_, kFrameTag));
  }
}

void Links::wait(milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  const auto left = [&] {
    return std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()), milliseconds{1});
  };
  std::vector<std::string> missing;
  bool timed_out = false;
  for (int i = 1; i < size_; ++i) {
    try {
      // After one has timed out, Gloo waits for no other either.
      receives_[static_cast<size_t>(i - 1)]->wait(left());
    } catch (const std::exception&) {
      timed_out = timed_out || Clock::now() + milliseconds{1} >= deadline;
      missing.push_back(names_[static_cast<size_t>((rank_ + i) % size_)]);
    }
  }
  if (timed_out) {
    throw TimedOut(c10::str("timed out after ", timeout.count(), " ms; not arrived: ", join_names(missing)));
  }
  if (!missing.empty()) throw PeerLost("lost the connection to " + join_names(missing));
  for (auto& send : sends_) send->wait(left());
}

}  // namespace opensmd
