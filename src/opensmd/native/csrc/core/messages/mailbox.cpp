#include "core/messages/mailbox.hpp"

#include <algorithm>
#include <cassert>

#include "core/protocol/futex.hpp"
#include "core/timeline/event_log.hpp"

namespace opensmd {

namespace {
// Small enough that reader and writer overlap, large enough that counters cost nothing.
constexpr size_t kPieceBytes = size_t{32} << 10;
constexpr size_t kLongPieceBytes = size_t{128} << 10;

size_t piece_bytes(size_t message_bytes) { return takes_long_ring(message_bytes) ? kLongPieceBytes : kPieceBytes; }

Copy copy_in(size_t message_bytes) { return takes_long_ring(message_bytes) ? copy_from_memory : copy_bytes; }

Copy copy_out(size_t message_bytes) {
  if (takes_long_ring(message_bytes)) return copy_from_afar_past_cache;
  return message_bytes <= kInCacheBytes ? copy_behind_writer : copy_bytes;
}
}  // namespace

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

// ---------------------------------------------------------------- posting

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

// ---------------------------------------------------------------- progress

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

// Nothing moves in a failed group: a caller that has seen the failure may have freed its messages' memory.
bool Mailbox::push(int destination) {
  if (context_.aborted()) return false;
  Outgoing& to = outgoing_[static_cast<size_t>(destination)];
  bool moved = false;
  while (!to.queue.empty()) {
    Message& message = *to.queue.front();
    moved |= push_message(to, message, destination);
    if (!message.started || message.moved < message.bytes) break;
    finish(message);
    to.queue.pop_front();
  }
  return moved;
}

void Mailbox::push_header(Outgoing& to, Message& message) {
  const MessageHeader header{message.bytes, message.tag, ++to.count, static_cast<uint64_t>(message.dtype)};
  to.ring->put(&header, sizeof(header));
  message.started = true;
  if (!takes_long_ring(message.bytes)) return;  // published together with what follows it
  to.ring->pad();
  to.ring->publish();
}

bool Mailbox::push_message(Outgoing& to, Message& message, int destination) {
  const bool begins = !message.started;
  if (begins) {
    if (to.ring->room() < kLine) return false;
    push_header(to, message);
  }
  RingWriter& ring = to.payload(message);
  size_t room = ring.room();
  bool moved = begins;
  do {
    const size_t piece = std::min({message.bytes - message.moved, room, piece_bytes(message.bytes)});
    ring.put(message.data + message.moved, piece, copy_in(message.bytes));
    message.moved += piece;
    if (message.moved == message.bytes) ring.pad();
    if (piece == 0 && !moved) return false;
    ring.publish();
    ring_doorbell(destination);
    moved = true;
    room = ring.room();
    if (piece == 0) break;
  } while (message.moved < message.bytes);
  return moved;
}

// Looking past a message that was not asked for is worth it only if a receive may be waiting behind it.
bool Mailbox::wants(int source) const {
  return std::any_of(receives_.begin(), receives_.end(), [source](const MessagePointer& receive) {
    return receive->peer == source || receive->peer == kAnySource;
  });
}

bool Mailbox::pull(int source, bool drain) { return !context_.aborted() && take_in(source, drain); }

bool Mailbox::take_in(int source, bool drain) {
  Incoming& from = incoming_[static_cast<size_t>(source)];
  bool moved = false;
  for (;;) {
    if (!from.active && !begin(source, from, drain)) return moved;
    moved |= copy_available(from, source);
    if (from.moved < from.header.bytes) return moved;
    complete(from, source);
    moved = true;
  }
}

bool Mailbox::begin(int source, Incoming& from, bool drain) {
  if (from.ring->available() < sizeof(MessageHeader)) return false;
  from.ring->peek(&from.header, sizeof(from.header));
  MessagePointer receive = find_receive(source, from.header.tag);
  if (receive == nullptr && !drain && !wants(source)) return false;
  if (receive == nullptr) keep_unexpected(from, source);
  from.ring->skip(sizeof(from.header));
  ++from.count;
  assert(from.header.number == from.count);
  from.active = true;
  from.moved = 0;
  if (takes_long_ring(from.header.bytes)) {
    from.ring->pad();
    from.ring->release();
  }
  if (receive != nullptr) deliver(from, std::move(receive), source);
  return true;
}

MessagePointer Mailbox::find_receive(int source, int64_t tag) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [source, tag](const MessagePointer& receive) {
    return receive->tag == tag && (receive->peer == source || receive->peer == kAnySource);
  });
  if (found == receives_.end()) return nullptr;
  MessagePointer receive = *found;
  receives_.erase(found);
  return receive;
}

// Whether the message fits its receive; if not, the receive fails.
bool Mailbox::accept(Message& message, const MessageHeader& header, int source) const {
  const auto sent = static_cast<DType>(header.dtype);
  if (message.bytes == header.bytes && may_become(sent, message.dtype)) return true;
  const auto described = [](size_t bytes, DType dtype) {
    const std::string size = std::to_string(bytes) + " bytes";
    return dtype == DType::Byte ? size : size + " of " + name_of(dtype);
  };
  message.failure_kind = ErrorKind::Mismatch;
  message.failure = title(message) + ": " + context_.name(source) + " sent " + described(header.bytes, sent) +
                    " with tag " + std::to_string(header.tag) + ", but the receiving buffer takes " +
                    described(message.bytes, message.dtype);
  return false;
}

void Mailbox::deliver(Incoming& from, MessagePointer message, int source) {
  message->from = source;
  from.to = accept(*message, from.header, source) ? message->data : nullptr;
  from.is_unexpected = false;
  from.message = std::move(message);
}

// Runs before anything leaves the ring. Without memory the group is over: the message blocks all behind it.
void Mailbox::keep_unexpected(Incoming& from, int source) {
  const MessageHeader& header = from.header;
  Unexpected kept{source, header.tag, header.bytes, static_cast<DType>(header.dtype), 0, nullptr};
  try {
    kept.data.reset(new std::byte[std::max<size_t>(kept.bytes, 1)]);
    from.unexpected = unexpected_.insert(unexpected_.end(), std::move(kept));
  } catch (const std::bad_alloc&) {
    context_.fail(ErrorKind::Other, context_.name(context_.rank) + " has no memory for a message that it has not asked for yet (" +
                                        std::to_string(header.bytes) + " bytes from " + context_.name(source) + ", tag=" +
                                        std::to_string(header.tag) + "); receive it before those that were sent after it");
  }
  from.is_unexpected = true;
  from.to = from.unexpected->data.get();
}

bool Mailbox::copy_available(Incoming& from, int source) {
  bool moved = false;
  RingReader& ring = from.payload();
  while (from.moved < from.header.bytes) {
    const size_t piece = std::min({from.header.bytes - from.moved, ring.available(), piece_bytes(from.header.bytes)});
    if (piece == 0) break;
    if (from.to != nullptr) ring.peek(from.to + from.moved, piece, copy_out(from.header.bytes));
    ring.skip(piece);
    from.moved += piece;
    if (from.moved == from.header.bytes) ring.pad();
    ring.release();
    ring_doorbell(source);
    moved = true;
  }
  if (from.is_unexpected) from.unexpected->arrived = from.moved;
  return moved;
}

void Mailbox::complete(Incoming& from, int source) {
  from.active = false;
  if (from.header.bytes == 0) {
    from.ring->pad();
    from.ring->release();
    ring_doorbell(source);
  }
  if (from.message != nullptr) {
    from.message->moved = from.moved;
    finish(*from.message);
    from.message = nullptr;
  }
}

bool Mailbox::take_unexpected(const MessagePointer& message) {
  const auto kept = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& candidate) {
    return candidate.tag == message->tag && (message->peer == candidate.source || message->peer == kAnySource);
  });
  if (kept == unexpected_.end()) return false;
  Incoming& from = incoming_[static_cast<size_t>(kept->source)];
  if (kept->arrived < kept->bytes) {
    // The rest is still arriving: it goes straight to its destination.
    deliver(from, message, kept->source);
    if (from.to != nullptr) copy_bytes(from.to, kept->data.get(), kept->arrived);
    const int source = kept->source;
    unexpected_.erase(kept);
    pull(source, false);
    return true;
  }
  message->from = kept->source;
  const MessageHeader header{kept->bytes, kept->tag, 0, static_cast<uint64_t>(kept->dtype)};
  if (accept(*message, header, kept->source)) {
    if (kept->bytes > 0) copy_bytes(message->data, kept->data.get(), kept->bytes);
    message->moved = kept->bytes;
  }
  unexpected_.erase(kept);
  finish(*message);
  return true;
}

// ---------------------------------------------------------------- probing

bool Mailbox::ready(int source, int64_t tag, size_t* bytes, int* from) {
  context_.fork_guard.check();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!arrived_before_failure(source, tag)) context_.check_usable("ready");
  advance(false);
  return find_ready(source, tag, bytes, from);
}

// What a member sent before the group failed can still be read: it may say why it failed. Posted receives are over, and
// their memory may be gone, so nothing more is delivered to them.
void Mailbox::keep_what_arrived() {
  receives_.clear();
  for (int source = 0; source < context_.size; ++source) {
    Incoming& from = incoming_[static_cast<size_t>(source)];
    if (from.active && !from.is_unexpected) {
      from.to = nullptr;
      from.message = nullptr;
    }
    take_in(source, true);
  }
}

bool Mailbox::arrived_before_failure(int source, int64_t tag) {
  if (!context_.aborted() || context_.left) return false;
  keep_what_arrived();
  return std::any_of(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& kept) {
    return kept.arrived == kept.bytes && kept.tag == tag && (source == kAnySource || source == kept.source);
  });
}

// The message at the front of a ring, unless it has begun to leave.
std::optional<MessageHeader> Mailbox::in_front(int source) {
  Incoming& from = incoming_[static_cast<size_t>(source)];
  MessageHeader header;
  if (from.active || from.ring->available() < sizeof(header)) return std::nullopt;
  from.ring->peek(&header, sizeof(header));
  return header;
}

bool Mailbox::find_ready(int source, int64_t tag, size_t* bytes, int* from) {
  const auto asked = [source](int member) { return source == kAnySource || source == member; };
  for (int s = 0; s < context_.size; ++s) {
    // The message in front may hide the one asked for.
    const auto header = asked(s) ? in_front(s) : std::nullopt;
    if (header && header->tag != tag) pull(s, true);
  }
  const auto kept = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& candidate) {
    return candidate.tag == tag && asked(candidate.source);
  });
  if (kept != unexpected_.end()) {
    if (bytes != nullptr) *bytes = kept->bytes;
    if (from != nullptr) *from = kept->source;
    return true;
  }
  for (int s = 0; s < context_.size; ++s) {
    const auto header = asked(s) ? in_front(s) : std::nullopt;
    if (!header || header->tag != tag) continue;
    if (bytes != nullptr) *bytes = header->bytes;
    if (from != nullptr) *from = s;
    return true;
  }
  return false;
}

}  // namespace opensmd
