#include "torch/hosts/waits.hpp"

#include "core/errors.hpp"

namespace opensmd {

// That a work is under way.
class Waits::Entry {
 public:
  Entry(Waits& waits, const WorkPtr& work) : waits_(waits) {
    std::lock_guard lock(waits_.mutex_);
    late_ = waits_.ended_;
    place_ = waits_.under_way_.insert(waits_.under_way_.end(), work);
  }
  ~Entry() {
    std::lock_guard lock(waits_.mutex_);
    waits_.under_way_.erase(place_);
  }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

  bool late() const { return late_; }  // begun after the end

 private:
  Waits& waits_;
  bool late_ = false;
  std::list<WorkPtr>::iterator place_;
};

void Waits::wait(const WorkPtr& work, std::chrono::milliseconds timeout) {
  const Entry entry(*this, work);
  if (!work->wait(entry.late() ? std::chrono::milliseconds{1} : timeout)) {
    throw PeerLost("lost the connection: the group has failed");
  }
}

void Waits::end() {
  std::lock_guard lock(mutex_);
  ended_ = true;
  for (const auto& work : under_way_) work->abort();
}

}  // namespace opensmd
