// Messages between the members of a group for programs that do not know in which order they will need them: the
// pipeline's transport. A sender is never held up by its receiver, and a receiver can ask what has come. Beside torch's
// send and recv, whose messages it never meets, because its tags are its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "torch/backend.hpp"
#include "torch/blocks.hpp"

namespace opensmd {

// One member's end. CPU tensors; any thread. No method may be called with Python's lock held.
class TensorMailbox {
 public:
  using Wanted = std::vector<std::pair<int, int64_t>>;  // (source, tag)
  using Sent = std::tuple<int64_t, int, int64_t>;  // (nanoseconds of the monotonic clock, destination, tag)

  explicit TensorMailbox(const c10::intrusive_ptr<SmddpBackend>& backend);

  // Returns at once; `tensor` must not change before it has left, and is kept alive until then.
  void send(int destination, int64_t tag, const at::Tensor& tensor);
  // Whether a message has begun to arrive.
  bool ready(int source, int64_t tag);
  // `count` elements as a vector; a large message stays where its sender has put it.
  at::Tensor receive(int source, int64_t tag, int64_t count, at::ScalarType dtype, milliseconds timeout = {});
  // A message that has begun to arrive, of this shape, with these strides if there are any; nothing if none has.
  std::optional<at::Tensor> take(int source, int64_t tag, at::IntArrayRef sizes, at::IntArrayRef strides,
                                 at::ScalarType dtype);
  // Waits until a message for one of the pairs has begun to arrive; the index of the first such pair.
  size_t wait_any(Wanted wanted, milliseconds timeout);
  // Waits until everything sent has left its tensors.
  void flush(milliseconds timeout);
  // The latest messages of this member, some thousands, earliest first.
  std::vector<Sent> sent();

 private:
  struct Leaving {
    std::shared_ptr<Request> request;
    at::Tensor data;
  };

  void note(int destination, int64_t tag);
  void post(int destination, int64_t tag, const at::Tensor& data);
  at::Tensor arriving(int source, int64_t tag, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                      milliseconds timeout);
  void receive_into(void* data, size_t bytes, int source, int64_t tag, milliseconds timeout);
  void forget_what_left();

  std::shared_ptr<Group> group_;
  std::mutex mutex_;
  Blocks blocks_;
  std::deque<Leaving> leaving_;
  std::deque<Sent> sent_;
};

}  // namespace opensmd
