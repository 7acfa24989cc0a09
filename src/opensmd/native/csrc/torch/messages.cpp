// send, recv and recv from any source: they bypass the queue and may run at the same time as collectives.
#include "torch/backend.hpp"

#include <ATen/ATen.h>

#include "core/protocol/clock.hpp"
#include "core/timeline/event_log.hpp"

namespace opensmd {

WorkPtr SmddpBackend::message(c10d::OpType type, const char* title, Tensors& tensors, int peer, int tag) {
  require_usable();
  TORCH_CHECK_VALUE(tensors.size() == 1, "smddp: a message is one tensor, but got ", tensors.size());
  TORCH_CHECK_VALUE(tensors[0].layout() == at::kStrided, "smddp: a message must be a dense tensor, but got ",
                    tensors[0].layout());
  require_memory(tensors[0], "a message");
  TORCH_CHECK_VALUE(tag >= 0, "smddp: the tag of a message must not be negative, but is ", tag);
  TORCH_CHECK_VALUE(peer < size_ && (peer >= 0 || type == c10d::OpType::RECVANYSOURCE), "smddp: rank ", peer,
                    " is not in this group of ", size_, " ranks");
  const auto& tensor = tensors[0];
  bool sends = type == c10d::OpType::SEND;
  at::Tensor flat = tensor;
  if (sends) {
    flat = tensor.resolve_conj().resolve_neg().contiguous();
  } else if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    flat = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  }
  const uint64_t start_ns = timeline_group_ == 0 ? 0 : now_ns();
  std::shared_ptr<Request> request;
  with_torch_errors([&] {
    request = sends ? transport_->post_send(flat, peer, tag) : transport_->post_receive(flat, peer, tag);
  });
  if (unclaimed_) unclaimed_->forget_done();
  auto work = c10::make_intrusive<MessageWork>(rank_, type, title, tensor, flat, ++messages_, std::move(request),
                                               unclaimed_, timeout_.load());
  if (start_ns != 0) work->record_as(message_event(title, tensor, peer, start_ns));
  return note(std::move(work));
}

Event SmddpBackend::message_event(const char* title, const at::Tensor& tensor, int peer, uint64_t start_ns) const {
  Event event;
  event.start_ns = start_ns;
  event.bytes = bytes_of(tensor);
  event.group = timeline_group_;
  event.peer = peer;
  event.operation = EventLog::of_process().operation(title);
  return event;
}

WorkPtr SmddpBackend::send(Tensors& tensors, int destination, int tag) {
  if (!tensors.empty() && !tensors[0].is_cpu()) return device_backend()->send(tensors, destination, tag);
  return message(c10d::OpType::SEND, "smddp:send", tensors, destination, tag);
}

WorkPtr SmddpBackend::recv(Tensors& tensors, int source, int tag) {
  if (!tensors.empty() && !tensors[0].is_cpu()) return device_backend()->recv(tensors, source, tag);
  return message(c10d::OpType::RECV, "smddp:recv", tensors, source, tag);
}

WorkPtr SmddpBackend::recvAnysource(Tensors& tensors, int tag) {
  if (!tensors.empty() && !tensors[0].is_cpu()) return device_backend()->recvAnysource(tensors, tag);
  return message(c10d::OpType::RECVANYSOURCE, "smddp:recvAnySource", tensors, kAnySource, tag);
}

}  // namespace opensmd
