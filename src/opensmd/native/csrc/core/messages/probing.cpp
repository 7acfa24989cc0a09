// Whether a message has come, without receiving it, and what had come when the group failed.
#include <algorithm>

#include "core/messages/mailbox.hpp"

namespace opensmd {

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
