// Compares the two ends of messages between hosts when both have waited long.
//
// A message whose size or dtype is not its receiver's does not arrive (Wire::tag_on_wire), and both ends wait for each
// other. But messages between two members with one tag are received in the order they are sent. So each end counts, and
// a waiting end writes into the group's store which message it waits for, and what that is:
//
//      member 0                          store                             member 1
//      sends 12 bytes of float32, the 3rd with tag 7
//                                 ──►    0 to 1, tag 7, sent: 3, float32
//                                        0 to 1, tag 7, received: 3, int32    ◄──   receives 12 bytes of int32, the 3rd
//      reads that 1 waits for int32 in its place
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "core/errors.hpp"
#include "torch/hosts/layout.hpp"
#include "torch/hosts/messages/host_messages.hpp"

namespace opensmd {

// Members that wait for each other in one message have posted different ones.
class DifferentEnds : public CollectiveError {
 public:
  using CollectiveError::CollectiveError;
};

class MessageEnds {
 public:
  class End;

  MessageEnds(c10::intrusive_ptr<c10d::Store> store, const Layout& layout) : store_(std::move(store)), layout_(layout) {}

  // For a message posted now. Null if the other end's count is unknown, or the message is not compared.
  std::unique_ptr<End> add(const Posting& posting);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const Layout& layout_;
  std::mutex mutex_;
  std::map<std::tuple<bool, int, int64_t>, uint64_t> counts_;  // by whether it is sent, peer and tag
  std::set<int64_t> from_anybody_;                             // tags
};

class MessageEnds::End {
 public:
  struct Message {
    uint64_t number;
    int tag_on_wire;
    std::string text;  // "sends 12 bytes of float32"
  };

  End(c10::intrusive_ptr<c10d::Store> store, std::string own_key, std::string other_key, Message message)
      : store_(std::move(store)),
        own_key_(std::move(own_key)),
        other_key_(std::move(other_key)),
        message_(std::move(message)) {}

  // Call while this end waits: what the other end waits for instead; empty if that is the same, or not known.
  std::string difference() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string own_key_;
  const std::string other_key_;
  const Message message_;
};

}  // namespace opensmd
