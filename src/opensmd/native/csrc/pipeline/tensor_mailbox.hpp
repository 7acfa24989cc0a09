// Messages between members for programs that do not know in which order they will need them: the pipeline's transport.
// A sender never waits for its receiver, and a receiver can ask what has come. Independent of torch's send and recv, as
// its tags are its own.
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

// One member's end. CPU tensors; any thread. Call no method with Python's lock held.
class TensorMailbox {
 public:
  using Wanted = std::vector<std::pair<int, int64_t>>;  // (source, tag)
  using Sent = std::tuple<int64_t, int, int64_t>;  // (nanoseconds of the monotonic clock, destination, tag)

  explicit TensorMailbox(const c10::intrusive_ptr<SmddpBackend>& backend);

  // Returns at once; `tensor` is kept alive, and must not change, until it has left.
  void send(int destination, int64_t tag, const at::Tensor& tensor);
  // Whether a message has begun to arrive.
  bool ready(int source, int64_t tag);
  // `count` elements as a vector; a large message stays where its sender put it.
  at::Tensor receive(int source, int64_t tag, int64_t count, at::ScalarType dtype, milliseconds timeout = {});
  // A message of this shape, and these strides if any, that has begun to arrive; nothing if none has.
  std::optional<at::Tensor> take(int source, int64_t tag, at::IntArrayRef sizes, at::IntArrayRef strides,
                                 at::ScalarType dtype);
  // Waits until a message for one of the pairs has begun to arrive; the index of the first such pair.
  size_t wait_any(Wanted wanted, milliseconds timeout);
  // Waits until everything sent has left its tensors.
  void flush(milliseconds timeout);
  // This member's latest messages, some thousands, oldest first.
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
