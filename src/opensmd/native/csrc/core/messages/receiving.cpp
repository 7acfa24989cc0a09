// Messages on their way out of the rings, to the receives that match them or into private memory.
#include <algorithm>
#include <cassert>

#include "core/messages/mailbox.hpp"

namespace opensmd {

namespace {
Copy copy_out(size_t message_bytes) {
  if (takes_long_ring(message_bytes)) return copy_from_afar_past_cache;
  return message_bytes <= kInCacheBytes ? copy_behind_writer : copy_bytes;
}
}  // namespace

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
    context_.fail(ErrorKind::Other,
                  context_.name(context_.rank) + " has no memory for a message that it has not asked for yet (" +
                      std::to_string(header.bytes) + " bytes from " + context_.name(source) +
                      ", tag=" + std::to_string(header.tag) + "); receive it before those that were sent after it");
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

}  // namespace opensmd
