// Messages of a group whose members also get messages another way; only there can they receive from any source.
//
// A member receives here until it first wants a message from any source. Then it closes its inbox: later senders see
// that and use the other way, and the member waits for messages already on their way here, so that messages of a pair
// keep their order.
//
//      sender     posted + 1 ── closed? ── no: the message follows
//      receiver   closed = 1 ── wait until as many have begun to arrive as are posted
//
// At least one sees the other: either the sender sees that the inbox is closed, or the receiver waits for the message.
#include "core/messages/mailbox.hpp"

namespace opensmd {

MessagePointer Mailbox::post_send_if_open(const void* data, size_t bytes, int destination, int64_t tag, DType dtype) {
  Inbox& inbox = context_.arena.member(destination).inbox;
  inbox.posted.fetch_add(1, std::memory_order_seq_cst);
  MessagePointer message;
  try {
    if (inbox.closed.load(std::memory_order_seq_cst) == 0) message = post_send(data, bytes, destination, tag, dtype);
  } catch (...) {
    inbox.posted.fetch_sub(1, std::memory_order_seq_cst);
    throw;
  }
  if (message == nullptr) {
    inbox.posted.fetch_sub(1, std::memory_order_seq_cst);
    ring_doorbell(destination);
  }
  return message;
}

MessagePointer Mailbox::post_receive_of_arrived(void* data, size_t bytes, int source, int64_t tag, DType dtype) {
  context_.check_usable("recv");
  std::lock_guard<std::mutex> lock(mutex_);
  if (!find_ready(source, tag, nullptr, nullptr)) return nullptr;
  return begin_receive(data, bytes, source, tag, dtype);
}

void Mailbox::close_inbox(milliseconds timeout) {
  context_.check_usable("recv");
  context_.arena.member(context_.rank).inbox.closed.store(1, std::memory_order_seq_cst);
  const auto find = [this] { return all_begun(); };
  const auto expected = [this] {
    const std::string title = "recv(from any rank) on " + context_.name(context_.rank);
    return std::vector<Expectation>{{Message::Kind::Receive, kAnySource, title}};
  };
  wait_until(find, expected, timeout);
  withdraw_receives();
}

// Call with the lock held.
size_t Mailbox::all_begun() {
  uint64_t begun = 0;
  for (int source = 0; source < context_.size; ++source) {
    pull(source, true);
    begun += incoming_[static_cast<size_t>(source)].count;
  }
  return begun == context_.arena.member(context_.rank).inbox.posted.load(std::memory_order_seq_cst) ? 0 : kNotYet;
}

void Mailbox::withdraw_receives() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const MessagePointer& receive : receives_) {
    receive->withdrawn = true;
    finish(*receive);
  }
  receives_.clear();
  ring_doorbell(context_.rank);  // wakes threads that wait for one of them
}

}  // namespace opensmd
