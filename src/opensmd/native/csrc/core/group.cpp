#include "core/group.hpp"

#include "core/algorithms/all_gather.hpp"
#include "core/algorithms/all_reduce.hpp"
#include "core/algorithms/all_to_all.hpp"
#include "core/algorithms/barrier.hpp"
#include "core/algorithms/broadcast.hpp"
#include "core/algorithms/gather.hpp"
#include "core/algorithms/reduce.hpp"
#include "core/algorithms/reduce_scatter.hpp"
#include "core/algorithms/scatter.hpp"
#include "core/group_parts.hpp"

namespace opensmd {

namespace {

// An error inside a collective (no memory for a slot, say) must not leave the peers waiting.
template <class Collective, class Options>
void guarded(Context& context, Collective collective, const Options& options, const Call& call) {
  try {
    collective(context, options, call);
  } catch (const CollectiveError& error) {
    // Errors that name their operation have aborted the group already.
    if (context.fork_guard.in_child() || context.left || context.aborted()) throw;
    context.fail(ErrorKind::Other, context.describe(context.rank, context.sequence) + " #" +
                                       std::to_string(context.sequence) + " on " + context.name(context.rank) + ": " +
                                       error.what());
  }
}

}  // namespace

Group::Group(GroupConfig config) : parts_(std::make_unique<GroupParts>(std::move(config))) {}

Group::~Group() {
  if (parts_->context.fork_guard.in_child()) {
    // The helper thread and the locks belong to the parent: a child can only forget them.
    static_cast<void>(parts_.release());
    return;
  }
  leave();
}

int Group::rank() const { return parts_->context.rank; }
int Group::size() const { return parts_->context.size; }

void Group::barrier(const Call& call) {
  guarded(
      parts_->context, [](Context& context, int, const Call& given) { opensmd::barrier(context, given); }, 0, call);
}

void Group::all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor, const Call& call) {
  guarded(parts_->context, opensmd::all_reduce, AllReduceOptions{data, count, dtype, reduction, factor}, call);
}

void Group::reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
                   const Call& call) {
  guarded(parts_->context, opensmd::reduce, ReduceOptions{in, out, count, dtype, reduction, root, factor}, call);
}

void Group::broadcast(void* data, size_t count, DType dtype, int root, const Call& call) {
  guarded(parts_->context, opensmd::broadcast, BroadcastOptions{data, count, dtype, root}, call);
}

void Group::all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) {
  guarded(parts_->context, opensmd::all_gather, AllGatherOptions{in, outs, counts, dtype}, call);
}

void Group::gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) {
  guarded(parts_->context, opensmd::gather, GatherOptions{in, outs, count, dtype, root}, call);
}

void Group::scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) {
  guarded(parts_->context, opensmd::scatter, ScatterOptions{ins, out, count, dtype, root}, call);
}

void Group::reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                           double factor, const Call& call) {
  guarded(parts_->context, opensmd::reduce_scatter, ReduceScatterOptions{ins, counts, out, dtype, reduction, factor},
          call);
}

void Group::all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                       DType dtype, const Call& call) {
  guarded(parts_->context, opensmd::all_to_all, AllToAllOptions{ins, in_counts, outs, out_counts, dtype}, call);
}

void* Group::heap_allocate(size_t bytes) {
  parts_->context.fork_guard.check();
  return parts_->context.heap.allocate(bytes);
}

void Group::heap_free(void* block) {
  // A child may also destroy its copy of a tensor; the block is the parent's.
  if (!parts_->context.fork_guard.in_child()) parts_->context.heap.free(block);
}

bool Group::heap_contains(const void* address) const { return parts_->context.heap.contains(address); }

uint64_t Group::heap_offset(const void* address) const { return parts_->context.heap.offset_of(address); }

void* Group::heap_address(int member, uint64_t offset, size_t bytes) const {
  const Arena& arena = parts_->context.arena;
  if (member < 0 || member >= size() || bytes > arena.shape().heap_bytes ||
      offset > arena.shape().heap_bytes - bytes) {
    throw std::out_of_range("heap_address: not within the heap of a member");
  }
  return arena.heap(member) + offset;
}

std::shared_ptr<Request> Group::post_send(const void* data, size_t bytes, int destination, int64_t tag, DType dtype) {
  return parts_->mailbox.post_send(data, bytes, destination, tag, dtype);
}

std::shared_ptr<Request> Group::post_receive(void* data, size_t bytes, int source, int64_t tag, DType dtype) {
  return parts_->mailbox.post_receive(data, bytes, source, tag, dtype);
}

std::shared_ptr<Request> Group::post_send_if_open(const void* data, size_t bytes, int destination, int64_t tag,
                                                  DType dtype) {
  return parts_->mailbox.post_send_if_open(data, bytes, destination, tag, dtype);
}

void Group::close_inbox(milliseconds timeout) { parts_->mailbox.close_inbox(timeout); }

bool Group::is_withdrawn(const Request& request) { return static_cast<const Message&>(request).withdrawn; }

std::shared_ptr<Request> Group::post_receive_of_arrived(void* data, size_t bytes, int source, int64_t tag,
                                                        DType dtype) {
  return parts_->mailbox.post_receive_of_arrived(data, bytes, source, tag, dtype);
}

bool Group::ready(int source, int64_t tag, size_t* bytes, int* from) {
  return parts_->mailbox.ready(source, tag, bytes, from);
}

size_t Group::wait_ready(const std::vector<std::pair<int, int64_t>>& wanted, milliseconds timeout) {
  if (wanted.empty()) throw std::invalid_argument("wait_ready got nothing to wait for");
  return parts_->mailbox.wait_ready(wanted, timeout);
}

void Group::set_timeout(milliseconds timeout) { parts_->context.timeout = timeout; }

size_t Group::wait_any(const std::vector<std::shared_ptr<Request>>& requests, milliseconds timeout) {
  if (requests.empty()) throw std::invalid_argument("wait_any got no requests to wait for");
  std::vector<const Message*> messages;
  for (const auto& request : requests) messages.push_back(static_cast<const Message*>(request.get()));
  return parts_->mailbox.wait_for_any(messages.data(), messages.size(), timeout);
}

void Group::abort(const std::string& reason) {
  parts_->context.fork_guard.check();
  parts_->context.abort(ErrorKind::Aborted, reason);
}

bool Group::aborted() const { return parts_->context.aborted(); }

void Group::leave() {
  Context& context = parts_->context;
  if (context.left.exchange(true)) return;
  parts_->mailbox.stop();
  context.liveness.mark_left();
}

MemberStatus Group::status(int member) const {
  const Context& context = parts_->context;
  const Progress& progress = context.arena.member(member).progress;
  MemberStatus status;
  status.state = context.liveness.state_of(member);
  status.completed = progress.completed.load(std::memory_order_acquire);
  status.entered = progress.entered.load(std::memory_order_acquire);
  if (status.entered > 0) status.last = Record(context.arena, member, Record::Collectives).at(status.entered);
  return status;
}

std::vector<RecordEntry> Group::record(int member) const {
  const Arena& arena = parts_->context.arena;
  return Record(arena, member, Record::Collectives).latest(arena.member(member).progress.entered.load());
}

std::vector<RecordEntry> Group::message_record(int member) const {
  const Arena& arena = parts_->context.arena;
  return Record(arena, member, Record::Messages).latest(arena.member(member).progress.messages.load());
}

uint64_t Group::sequence() const { return parts_->context.sequence; }

void Group::record_as(uint32_t group) { parts_->context.timeline_group = group; }

}  // namespace opensmd
