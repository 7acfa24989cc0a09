// A send or receive in progress: what Request gives users, and what the mailbox works on.
#pragma once

#include <atomic>
#include <string>

#include "core/errors.hpp"
#include "core/kernels/types.hpp"
#include "core/messages/request.hpp"

namespace opensmd {

class Mailbox;

class Message : public Request {
 public:
  enum class Kind { Send, Receive };

  Message(Mailbox& mailbox, Kind kind, std::byte* data, size_t bytes, int peer, int64_t tag, DType dtype)
      : mailbox(mailbox), kind(kind), data(data), bytes(bytes), peer(peer), tag(tag), dtype(dtype) {}

  bool done() override;
  bool in_vain() override;
  void wait(milliseconds timeout) override;
  int source() const override { return from; }
  size_t received_bytes() const override { return kind == Kind::Receive ? moved : 0; }

  bool complete() const { return complete_.load(std::memory_order_acquire); }
  void finish() { complete_.store(true, std::memory_order_release); }
  void throw_if_failed() const {
    if (!failure.empty()) throw_error(failure_kind, failure);
  }

  Mailbox& mailbox;
  const Kind kind;
  std::byte* const data;
  const size_t bytes;
  const int peer;  // kAnySource for a receive from any source
  const int64_t tag;
  const DType dtype;
  uint64_t number = 0;  // in the record
  uint64_t start_ns = 0;
  bool started = false;  // a send's header has been written
  bool withdrawn = false;  // a receive that will never be matched; written before finish()
  size_t moved = 0;
  int from = kAnySource;
  std::atomic<uint64_t> next_look_ns{0};  // at the peers, for callers that do not wait
  std::string failure;  // written before finish()
  ErrorKind failure_kind = ErrorKind::Other;

 private:
  std::atomic<bool> complete_{false};
};

}  // namespace opensmd
