#include "torch/hosts/messages/gloo_request.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace opensmd {

GlooRequest::GlooRequest(std::shared_ptr<Wire> wire, std::shared_ptr<Failure> failure,
                         c10::intrusive_ptr<c10d::Work> work, milliseconds timeout, Message message)
    : wire_(std::move(wire)),
      failure_(std::move(failure)),
      work_(std::move(work)),
      timeout_(timeout),
      message_(std::move(message)) {}

// A caller that polls may drop the request; its thread would then wait for the message, and the future's destructor for
// the thread.
GlooRequest::~GlooRequest() {
  while (waiting_.valid() && waiting_.wait_for(milliseconds{1}) != std::future_status::ready) wire_->forget(work_);
}

bool GlooRequest::done() {
  std::lock_guard lock(mutex_);
  if (finished_) return true;
  start_waiting(timeout_);
  if (is_over()) return true;
  if (Clock::now() >= next_look_) look();
  return false;
}

bool GlooRequest::in_vain() {
  std::lock_guard lock(mutex_);
  return !difference_.empty();
}

void GlooRequest::wait(milliseconds timeout) {
  const milliseconds asked = timeout.count() > 0 ? timeout : timeout_;
  auto deadline = Clock::time_point::max();  // Gloo itself keeps the deadline of a wait that begins here
  {
    std::lock_guard lock(mutex_);
    if (!finished_ && !start_waiting(asked)) deadline = Clock::now() + std::min(asked, timeout_);
  }
  try {
    await(asked, deadline);
  } catch (const DifferentEnds& error) {
    throw CollectiveError(failure_->note(message_.where, error));
  } catch (const std::exception& error) {
    if (message_.quiet) throw CollectiveError(message_.where + ": " + error.what());
    throw CollectiveError(failure_->note_message(message_.where, message_.peer, error));
  }
  std::lock_guard lock(mutex_);
  finished_ = true;
}

void GlooRequest::await(milliseconds timeout, Clock::time_point deadline) {
  while (waiting_.wait_until(std::min(next_look(), deadline)) != std::future_status::ready) {
    if (Clock::now() >= deadline) throw TimedOut(c10::str("Timed out after ", timeout.count(), " ms"));
    std::lock_guard lock(mutex_);
    if (difference_.empty()) look();
    if (!difference_.empty()) throw DifferentEnds(failure_->name(message_.peer) + " " + difference_ + " instead");
  }
  waiting_.get();
}

bool GlooRequest::start_waiting(milliseconds timeout) {
  if (waiting_.valid()) return false;
  next_look_ = Clock::now() + pauses_.next();
  waiting_ = std::async(std::launch::async, [wire = wire_, work = work_, peer = message_.peer, timeout] {
    wire->wait(work, peer, timeout);
  }).share();
  return true;
}

GlooRequest::Clock::time_point GlooRequest::next_look() {
  std::lock_guard lock(mutex_);
  return difference_.empty() ? next_look_ : Clock::now();
}

void GlooRequest::look() {
  wire_->end_lost_waits();
  if (message_.end) difference_ = message_.end->difference();
  next_look_ = Clock::now() + pauses_.next();
}

}  // namespace opensmd
