#include "torch/hosts/messages/message_ends.hpp"

#include <sstream>

#include "torch/hosts/wire.hpp"
#include "torch/hosts/within.hpp"

namespace opensmd {
namespace {

std::string key_of(bool sent, int from, int to, int64_t tag) {
  return c10::str("opensmd/message/", sent ? "sent" : "received", "/", from, "/", to, "/", tag);
}

std::string written(const MessageEnds::End::Message& message) {
  return c10::str(message.number, " ", message.tag_on_wire, " ", message.text);
}

MessageEnds::End::Message message_from(const std::string& written) {
  MessageEnds::End::Message message;
  std::istringstream from(written);
  from >> message.number >> message.tag_on_wire >> std::ws;
  std::getline(from, message.text);
  return message;
}

}  // namespace

std::unique_ptr<MessageEnds::End> MessageEnds::add(const Posting& posting) {
  const auto& [sends, tensor, peer, tag, dtype] = posting;
  std::lock_guard lock(mutex_);
  if (peer == kAnySource) from_anybody_.insert(tag);
  // Within one host, whether a message goes over the wire depends on the receiver.
  if (peer == kAnySource || layout_.host_of(peer) == layout_.host() || !says_kind(tag)) return nullptr;
  const auto number = ++counts_[{sends, peer, tag}];
  if (!sends && from_anybody_.count(tag) > 0) return nullptr;
  const int own = layout_.member(), from = sends ? own : peer, to = sends ? peer : own;
  return std::make_unique<End>(store_, key_of(sends, from, to, tag), key_of(!sends, from, to, tag),
                               End::Message{number, tag_on_wire(tag, tensor.nbytes(), dtype),
                                            c10::str(sends ? "sends " : "expects ", tensor.nbytes(), " bytes of ", name_of(dtype))});
}

std::string MessageEnds::End::difference() const {
  return within(kStoresTime, [store = store_, own_key = own_key_, other_key = other_key_, own = message_] {
    store->set(own_key, written(own));
    if (!store->check({other_key})) return std::string();
    const auto other = message_from(store->get_to_str(other_key));
    return other.number == own.number && other.tag_on_wire != own.tag_on_wire ? other.text : std::string();
  });
}

}  // namespace opensmd
