// Posting messages, and who moves them on.
#include "core/messages/mailbox.hpp"

#include "core/protocol/futex.hpp"
#include "core/timeline/event_log.hpp"

namespace opensmd {

bool Message::done() {
  if (!complete()) mailbox.progress();
  return complete();
}

bool Message::in_vain() { return mailbox.in_vain(*this); }

void Message::wait(milliseconds timeout) {
  mailbox.wait(*this, timeout);
  throw_if_failed();
}

Mailbox::Mailbox(Context& context)
    : context_(context), record_(context.arena, context.rank, Record::Messages),
      incoming_(static_cast<size_t>(context.size)), outgoing_(static_cast<size_t>(context.size)),
      progress_thread_({[this] { return busy(); }, [this] { return progress_in_background(); }}) {
  const Arena& arena = context_.arena;
  const auto make = [&arena](auto& end, int from, int to, RingKind kind) {
    end.emplace(arena.ring_line(from, to, kind), arena.ring(from, to, kind), arena.ring_bytes(kind));
  };
  for (int i = 0; i < context_.size; ++i) {
    const size_t at = static_cast<size_t>(i);
    make(incoming_[at].ring, i, context_.rank, RingKind::Short);
    make(incoming_[at].long_ring, i, context_.rank, RingKind::Long);
    make(outgoing_[at].ring, context_.rank, i, RingKind::Short);
    make(outgoing_[at].long_ring, context_.rank, i, RingKind::Long);
  }
}

void Mailbox::stop() { progress_thread_.stop(); }

MessagePointer Mailbox::make(Message::Kind kind, void* data, size_t bytes, int peer, int64_t tag, DType dtype) {
  const bool send = kind == Message::Kind::Send;
  if (peer >= context_.size || peer < (send ? 0 : kAnySource)) {
    throw std::invalid_argument(std::string(send ? "send got destination " : "recv got source ") +
                                std::to_string(peer) + ", which is not one of the group's ranks 0 to " +
                                std::to_string(context_.size - 1));
  }
  return std::make_shared<Message>(*this, kind, static_cast<std::byte*>(data), bytes, peer, tag, dtype);
}

MessagePointer Mailbox::post_send(const void* data, size_t bytes, int destination, int64_t tag, DType dtype) {
  context_.check_usable("send");
  MessagePointer message = make(Message::Kind::Send, const_cast<void*>(data), bytes, destination, tag, dtype);
  std::lock_guard<std::mutex> lock(mutex_);
  context_.arena.reserve_ring(destination, RingKind::Short);
  if (takes_long_ring(bytes)) context_.arena.reserve_ring(destination, RingKind::Long);
  register_message(*message);
  outgoing_[static_cast<size_t>(destination)].queue.push_back(message);
  push(destination);
  if (!message->complete()) progress_thread_.notice();
  return message;
}

MessagePointer Mailbox::post_receive(void* data, size_t bytes, int source, int64_t tag, DType dtype) {
  context_.fork_guard.check();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!arrived_before_failure(source, tag)) context_.check_usable("recv");
  return begin_receive(data, bytes, source, tag, dtype);
}

MessagePointer Mailbox::begin_receive(void* data, size_t bytes, int source, int64_t tag, DType dtype) {
  MessagePointer message = make(Message::Kind::Receive, data, bytes, source, tag, dtype);
  register_message(*message);
  if (!take_unexpected(message)) {
    receives_.push_back(message);
    advance(false);
  }
  if (!message->complete()) progress_thread_.notice();
  return message;
}

void Mailbox::register_message(Message& message) {
  Signature signature;
  signature.operation = message.kind == Message::Kind::Send ? Operation::Send : Operation::Receive;
  signature.root = message.peer;
  signature.tag = message.tag;
  signature.count = message.bytes;
  message.number = ++posted_;
  message.start_ns = record_.begin(message.number, signature, {});
  context_.arena.member(context_.rank).progress.messages.store(message.number, std::memory_order_release);
  ++in_flight_;
}

void Mailbox::finish(Message& message) {
  note(message, record_.end(message.number));
  --in_flight_;
  message.finish();
}

void Mailbox::note(const Message& message, uint64_t end_ns) const {
  const uint32_t group = context_.timeline_group.load(std::memory_order_relaxed);
  if (group == 0 || message.withdrawn) return;
  const bool sends = message.kind == Message::Kind::Send;
  const auto operation = static_cast<uint32_t>(sends ? Operation::Send : Operation::Receive);
  const int peer = sends ? message.peer : message.from;
  EventLog::of_process().add({message.start_ns, end_ns, message.bytes, 0, group, peer, operation});
}

bool Mailbox::busy() {
  if (waiting_.load() > 0 || context_.aborted()) return false;  // nothing moves in a failed group
  std::lock_guard<std::mutex> lock(mutex_);
  return in_flight_ > 0;
}

bool Mailbox::progress() {
  context_.fork_guard.check();
  std::lock_guard<std::mutex> lock(mutex_);
  return advance(false);
}

// Nothing could catch what the helper thread throws (no memory for an unexpected message, say).
bool Mailbox::progress_in_background() {
  try {
    return progress();
  } catch (const std::exception& error) {
    context_.abort(ErrorKind::Other, "messages of " + context_.name(context_.rank) + " failed: " + error.what());
    return false;
  }
}

bool Mailbox::advance(bool drain) {
  bool moved = false;
  for (int i = 0; i < context_.size; ++i) {
    moved |= push(i);
    moved |= pull(i, drain);
  }
  return moved;
}

// The store of a counter and the check for sleepers are sequentially consistent, as on the sleeper's side.
void Mailbox::ring_doorbell(int member) {
  Doorbell& doorbell = context_.arena.member(member).doorbell;
  if (doorbell.sleepers.load(std::memory_order_seq_cst) == 0) return;
  doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(doorbell.rings);
}

}  // namespace opensmd
