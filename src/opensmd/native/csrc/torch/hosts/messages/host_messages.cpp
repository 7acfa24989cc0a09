#include "torch/hosts/messages/host_messages.hpp"

#include <utility>
#include <vector>

#include "torch/hosts/local.hpp"

namespace opensmd {

// One member's: whether its inbox is closed, and, in order, the receives that would then have to move.
struct HostMessages::Receives {
  std::mutex mutex;  // held while they move
  bool closed = false;
  std::vector<std::weak_ptr<Sharing>> open;
};

// A message in shared memory, until it moves to the wire.
class HostMessages::Sharing final : public Request {
 public:
  // May outlive the group. `here`: the members of this host.
  Sharing(Posting posting, std::shared_ptr<Request> request, std::vector<int> here, Fail fail,
          std::shared_ptr<Receives> receives)
      : posting_(std::move(posting)),
        here_(std::move(here)),
        fail_(std::move(fail)),
        receives_(std::move(receives)),
        shared_(std::move(request)) {}

  bool done() override {
    if (!shared_->done()) return false;
    auto moved = on_wire();
    return moved ? moved->done() : true;
  }

  bool in_vain() override { return shared_->in_vain(); }

  void wait(milliseconds timeout) override {
    try {
      shared_->wait(for_each_other(timeout));
    } catch (const std::exception& error) {
      fail_(posting_, error);
      throw;
    }
    if (auto moved = on_wire()) moved->wait(timeout);
  }

  int source() const override {
    auto moved = on_wire();
    return moved ? moved->source() : here_[static_cast<size_t>(shared_->source())];
  }
  size_t received_bytes() const override {
    auto moved = on_wire();
    return moved ? moved->received_bytes() : shared_->received_bytes();
  }

  const Posting& posting() const { return posting_; }
  bool withdrawn() const { return Group::is_withdrawn(*shared_); }
  bool complete() { return shared_->done(); }
  void move_to(std::shared_ptr<Request> on_wire) { moved_ = std::move(on_wire); }  // with the receives' lock held

 private:
  // What a message withdrawn from shared memory has become, or null.
  std::shared_ptr<Request> on_wire() const {
    if (!withdrawn()) return nullptr;
    std::lock_guard until_moved(receives_->mutex);
    return moved_;
  }

  const Posting posting_;
  const std::vector<int> here_;
  const Fail fail_;
  const std::shared_ptr<Receives> receives_;
  const std::shared_ptr<Request> shared_;
  std::shared_ptr<Request> moved_;
};

HostMessages::HostMessages(std::shared_ptr<Group> group, const Layout& layout, OnWire send, OnWire receive, Fail fail)
    : group_(std::move(group)),
      layout_(layout),
      send_(std::move(send)),
      receive_(std::move(receive)),
      fail_(std::move(fail)),
      receives_(std::make_shared<Receives>()) {}

HostMessages::~HostMessages() = default;

std::shared_ptr<Request> HostMessages::post_send(const Posting& posting) {
  if (!here(posting.peer)) return send_(posting);
  const auto& tensor = posting.tensor;
  std::shared_ptr<Request> request;
  try {
    request = group_->post_send_if_open(tensor.const_data_ptr(), tensor.nbytes(), place_of(posting.peer), posting.tag,
                                        posting.dtype);
  } catch (const CollectiveError& error) {
    fail_(posting, error);
    throw;
  }
  if (!request) return send_(posting);
  return std::make_shared<Sharing>(posting, std::move(request), layout_.here(), fail_, receives_);
}

std::shared_ptr<Request> HostMessages::post_receive(const Posting& posting) {
  const bool from_anybody = posting.peer == kAnySource;
  if (!from_anybody && !here(posting.peer)) return receive_(posting);
  std::lock_guard lock(receives_->mutex);
  try {
    if (from_anybody && !receives_->closed) receive_on_wire();
    auto request = arrived(posting);
    if (!request) return receive_(posting);
    auto sharing = std::make_shared<Sharing>(posting, std::move(request), layout_.here(), fail_, receives_);
    auto& open = receives_->open;
    std::erase_if(open, [](const auto& each) {
      const auto receive = each.lock();  // its handle may be dropped by another thread right now
      return !receive || receive->complete();
    });
    if (!receives_->closed) open.push_back(sharing);
    return sharing;
  } catch (const CollectiveError& error) {
    fail_(posting, error);
    throw;
  }
}

// What is arriving or has arrived in shared memory; null if everything now comes over the wire.
std::shared_ptr<Request> HostMessages::arrived(const Posting& posting) {
  void* data = posting.tensor.data_ptr();
  const size_t bytes = posting.tensor.nbytes();
  const int source = place_of(posting.peer);
  return receives_->closed ? group_->post_receive_of_arrived(data, bytes, source, posting.tag, posting.dtype)
                           : group_->post_receive(data, bytes, source, posting.tag, posting.dtype);
}

void HostMessages::receive_on_wire() {
  group_->close_inbox();
  receives_->closed = true;
  for (const auto& each : std::exchange(receives_->open, {})) {
    auto receive = each.lock();
    if (receive && receive->withdrawn()) receive->move_to(receive_(receive->posting()));
  }
}

}  // namespace opensmd
