#include "torch/hosts/links.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "core/protocol/context.hpp"

namespace opensmd {

Links::Links(Wire& wire, std::vector<int> members, size_t most)
    : wire_(wire),
      members_(std::move(members)),
      expected_(members_.size(), 0),
      taken_(members_.size(), 0) {
  own_ = static_cast<int>(std::find(members_.begin(), members_.end(), wire_.rank()) - members_.begin());
  const auto rows = static_cast<int64_t>(size()), width = static_cast<int64_t>(most);
  outgoing_ = at::empty({rows, width}, at::kByte);
  for (auto& rows_in : incoming_) rows_in = at::empty({rows, width}, at::kByte);
  for (auto& receives : receives_) receives.resize(members_.size());
  for (int index = 0; index < size(); ++index) {
    if (index != own_) expect_until(index, kFrames - 1);
  }
}

std::byte* Links::row(at::Tensor& rows, int index) const {
  return reinterpret_cast<std::byte*>(rows.data_ptr<uint8_t>() + index * rows.size(1));
}

void Links::expect_until(int index, size_t frame) {
  const auto at = static_cast<size_t>(index);
  while (expected_[at] < frame) {
    const size_t next = slot(++expected_[at]);
    try {
      receives_[next][at] = wire_.receive(incoming_[next][index], members_[at], kFrameTag);
    } catch (const std::exception&) {
      receives_[next][at] = nullptr;  // closed, perhaps for good reason: the frames before this one have come
    }
  }
}

void Links::post(int index, size_t bytes) {
  sends_.emplace_back(wire_.send(bytes_at(outgoing(index), bytes), members_[static_cast<size_t>(index)], kFrameTag),
                      index);
}

void Links::await(const WorkPtr& work, int index, Clock::time_point deadline, Outcome& outcome) const {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
  try {
    if (!work) throw PeerLost("closed");
    // Once one wait has timed out, Gloo's waits for the others fail, too.
    wire_.wait(work, members_[static_cast<size_t>(index)], std::max(left, milliseconds{1}));
  } catch (const std::exception&) {
    outcome.timed_out = outcome.timed_out || Clock::now() + milliseconds{1} >= deadline;
    outcome.missing.push_back(name(index));
  }
}

void Links::wait(const std::vector<int>& from, milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  Outcome received, sent;
  for (int index : from) expect_until(index, taken_[static_cast<size_t>(index)] + kFrames);
  for (int index : from) {
    const auto at = static_cast<size_t>(index);
    await(receives_[slot(++taken_[at])][at], index, deadline, received);
  }
  for (const auto& [work, index] : std::exchange(sends_, {})) {
    if (received.missing.empty()) await(work, index, deadline, sent);
  }
  const bool arrived = received.missing.empty();
  const auto& [missing, timed_out] = arrived ? sent : received;
  if (timed_out) {
    throw TimedOut(c10::str("timed out after ", timeout.count(), " ms; ", arrived ? "nothing taken by: " : "not arrived: ",
                            join_names(missing)));
  }
  if (!missing.empty()) throw PeerLost("lost the connection to " + join_names(missing));
}

}  // namespace opensmd
