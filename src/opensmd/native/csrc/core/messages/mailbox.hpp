// Point-to-point messages: matching, unexpected messages, and progress.
//
// 1. A send goes into the pair's ring as far as there is room; the rest waits in `outgoing` for progress.
// 2. Progress pulls messages whose receive is posted straight into its buffer. A message not yet asked for stays in the
//    ring, unless it hides one behind it that is waited for, or this member has been waiting for so long that its
//    peers may be waiting for room: then it moves into private memory ("unexpected"). So members that all send before
//    they receive never deadlock, at any size.
// 3. Any waiting caller makes progress. A helper thread does while something is in progress and no caller waits.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>

#include "core/messages/progress_thread.hpp"
#include "core/messages/message.hpp"
#include "core/messages/ring.hpp"
#include "core/protocol/context.hpp"

namespace opensmd {

using MessagePointer = std::shared_ptr<Message>;

class Mailbox {
 public:
  explicit Mailbox(Context& context);
  ~Mailbox() { stop(); }

  MessagePointer post_send(const void* data, size_t bytes, int destination, int64_t tag, DType dtype);
  MessagePointer post_receive(void* data, size_t bytes, int source, int64_t tag, DType dtype);
  bool ready(int source, int64_t tag, size_t* bytes, int* from);

  // A mailbox that is not the only way to its members; see inbox.cpp.
  MessagePointer post_send_if_open(const void* data, size_t bytes, int destination, int64_t tag, DType dtype);
  MessagePointer post_receive_of_arrived(void* data, size_t bytes, int source, int64_t tag, DType dtype);
  void close_inbox(milliseconds timeout);

  bool progress();  // true if anything moved
  bool busy();      // something is in progress and no one waits: work for the helper
  // Waits until one of them is complete; returns its index.
  size_t wait_for_any(const Message* const* messages, size_t count, milliseconds timeout);
  size_t wait_ready(const std::vector<std::pair<int, int64_t>>& wanted, milliseconds timeout);
  void wait(Message& message, milliseconds timeout);
  bool in_vain(Message& message);  // checks the peers once every kCheckInterval
  void stop();

 private:
  struct Unexpected {
    int source;
    int64_t tag;
    size_t bytes;
    DType dtype;
    size_t arrived = 0;
    std::unique_ptr<std::byte[]> data;
  };
  // The message that is currently leaving a ring.
  struct Incoming {
    std::optional<RingReader> ring;
    std::optional<RingReader> long_ring;
    RingReader& payload() { return takes_long_ring(header.bytes) ? *long_ring : *ring; }
    bool active = false;
    MessageHeader header{};
    size_t moved = 0;
    std::byte* to = nullptr;  // null: discarded
    MessagePointer message;   // the receive it goes to, or
    std::list<Unexpected>::iterator unexpected;
    bool is_unexpected = false;
    uint64_t count = 0;  // of messages begun
  };
  struct Outgoing {
    std::optional<RingWriter> ring;
    std::optional<RingWriter> long_ring;
    RingWriter& payload(const Message& message) { return takes_long_ring(message.bytes) ? *long_ring : *ring; }
    std::deque<MessagePointer> queue;
    uint64_t count = 0;
  };

  // What a caller waits for, as error messages need it.
  struct Expectation {
    Message::Kind kind;
    int peer;
    std::string title;
  };
  static constexpr size_t kNotYet = ~size_t{0};
  using Find = std::function<size_t()>;
  using Expected = std::function<std::vector<Expectation>()>;

  // mailbox.cpp
  MessagePointer make(Message::Kind kind, void* data, size_t bytes, int peer, int64_t tag, DType dtype);
  MessagePointer begin_receive(void* data, size_t bytes, int source, int64_t tag, DType dtype);  // with the lock held
  void register_message(Message& message);
  void finish(Message& message);
  void note(const Message& message, uint64_t end_ns) const;  // for the timeline
  bool progress_in_background();
  bool advance(bool drain);  // with the lock held, like all of sending.cpp and receiving.cpp
  void ring_doorbell(int member);

  // sending.cpp
  bool push(int destination);
  bool push_message(Outgoing& to, Message& message, int destination);
  void push_header(Outgoing& to, Message& message);

  // receiving.cpp
  bool pull(int source, bool drain);
  bool take_in(int source, bool drain);  // in a failed group, too
  bool begin(int source, Incoming& from, bool drain);
  bool wants(int source) const;
  MessagePointer find_receive(int source, int64_t tag);
  bool accept(Message& message, const MessageHeader& header, int source) const;
  void deliver(Incoming& from, MessagePointer message, int source);
  void keep_unexpected(Incoming& from, int source);
  bool copy_available(Incoming& from, int source);
  void complete(Incoming& from, int source);
  bool take_unexpected(const MessagePointer& message);

  // probing.cpp
  void keep_what_arrived();
  bool arrived_before_failure(int source, int64_t tag);
  std::optional<MessageHeader> in_front(int source);
  bool find_ready(int source, int64_t tag, size_t* bytes, int* from);

  // inbox.cpp
  size_t all_begun();
  void withdraw_receives();

  // waiting.cpp
  size_t look(const Find& find, bool drain, bool* moved);
  size_t wait_until(const Find& find, const Expected& expected, milliseconds timeout);
  size_t sleep_until(const Find& find, uint64_t until);
  void end_waiting();
  void look_after_peers(const Expectation& expectation, const Find& find);
  bool has_left(int member) const;
  int lost_peer(int expected) const;
  void warn_of_circle(const Expectation& expectation, const Find& find, uint64_t waited_ns, uint64_t timeout_ns);
  [[noreturn]] void give_up(ErrorKind kind, const std::string& text);
  [[noreturn]] void time_out(const std::vector<Expectation>& expected, uint64_t waited_ns);
  std::string title(const Message& message) const;

  Context& context_;
  Record record_;
  std::mutex mutex_;
  std::vector<Incoming> incoming_;
  std::vector<Outgoing> outgoing_;
  std::deque<MessagePointer> receives_;  // posted, in order, not begun
  std::list<Unexpected> unexpected_;     // in order of arrival
  std::atomic<size_t> in_flight_{0};  // changed with the lock held
  std::atomic<int> waiting_{0};
  uint64_t posted_ = 0;
  std::atomic<bool> warned_of_circle_{false};
  ProgressThread progress_thread_;
};

}  // namespace opensmd
