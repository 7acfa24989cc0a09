// Messages on their way into the rings.
#include <algorithm>

#include "core/messages/mailbox.hpp"

namespace opensmd {

namespace {
Copy copy_in(size_t message_bytes) { return takes_long_ring(message_bytes) ? copy_from_memory : copy_bytes; }
}  // namespace

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

}  // namespace opensmd
