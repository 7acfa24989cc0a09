// A send or a receive as its caller holds it.
#pragma once

#include <chrono>
#include <cstddef>

namespace opensmd {

using std::chrono::milliseconds;

constexpr int kAnySource = -1;

// A send or receive in progress. Its buffer must live until done. Dropping the last handle does not cancel it, except
// where ends_with_handle().
class Request {
 public:
  virtual ~Request() = default;
  virtual bool done() = 0;  // also makes progress; true after failure too
  virtual bool in_vain() { return false; }  // whether wait() would throw, as far as done() cannot tell
  // timeout 0: the group's. Throws what went wrong. A send is done when its buffer may be reused.
  virtual void wait(milliseconds timeout = milliseconds{0}) = 0;
  virtual int source() const = 0;           // of a completed receive
  virtual size_t received_bytes() const = 0;
  virtual bool ends_with_handle() const { return false; }
};

}  // namespace opensmd
