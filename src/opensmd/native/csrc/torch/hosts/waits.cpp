#include "torch/hosts/waits.hpp"

#include <exception>

#include "core/errors.hpp"
#include "core/group.hpp"

namespace opensmd {
namespace {

bool is_through(const Waits::WorkPtr& work) {
  try {
    return work->wait(std::chrono::milliseconds{1});
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

// A wait in progress.
class Waits::Entry {
 public:
  Entry(Waits& waits, const WorkPtr& work, int member) : waits_(waits) {
    std::lock_guard lock(waits_.mutex_);
    late_ = waits_.ended_;
    place_ = waits_.in_flight_.insert(waits_.in_flight_.end(), {work, member});
  }
  ~Entry() {
    std::lock_guard lock(waits_.mutex_);
    waits_.in_flight_.erase(place_);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool late() const { return late_; }  // began after end()
  bool forgotten() const {
    std::lock_guard lock(waits_.mutex_);
    return place_->forgotten;
  }

 private:
  Waits& waits_;
  bool late_ = false;
  All::iterator place_;
};

void Waits::wait(const WorkPtr& work, int member, std::chrono::milliseconds timeout) {
  const Entry entry(*this, work, member);
  const bool complete = !entry.late() && work->wait(timeout);
  if (complete) return;
  // Checking again would close the connection.
  if (entry.forgotten()) throw CollectiveError("nobody wants it any more");
  if (!is_through(work)) throw PeerLost("lost the connection");
}

void Waits::end() {
  std::lock_guard lock(mutex_);
  ended_ = true;
  for (const auto& each : in_flight_) each.work->abort();
}

void Waits::forget(const WorkPtr& work) {
  std::lock_guard lock(mutex_);
  for (auto& each : in_flight_) {
    if (each.work != work) continue;
    each.forgotten = true;
    work->abort();
  }
}

void Waits::end_where(const std::function<bool(int member)>& is_lost) {
  All waited_for;
  {
    std::lock_guard lock(mutex_);
    waited_for = in_flight_;
  }
  for (const auto& each : waited_for) {
    if (each.member != kAnySource && is_lost(each.member)) each.work->abort();
  }
}

}  // namespace opensmd
