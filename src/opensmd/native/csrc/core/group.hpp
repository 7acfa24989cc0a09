// The only header that users of the core include: a group of processes on one host that share an arena of memory.
//
// Life of a group:
//   1. One member calls create_arena_file(); path and token travel to the others (through torch's store).
//   2. The others call open_arena_file(path, token); every member constructs a Group from its descriptor.
//   3. When all have opened it, the creator calls unlink_arena_file() (does nothing for a memfd).
//   4. Calls; then leave(), or the destructor.
//
// Memory: an idle group touches less than 2 MiB per member (about 64 KiB). Under load a member's own shared memory
// grows to at most 4 * (staging_bytes + chunk_bytes) (3 MiB by default) and two pages for collectives, ring_bytes for
// each member it sends point-to-point messages to, long_ring_bytes for each it sends large ones to, and what
// heap_allocate() handed out (plus freed blocks kept for reuse, at most as much as is in use or 64 MiB, whichever is
// more). Messages not yet asked for wait in private memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/errors.hpp"
#include "core/kernels/types.hpp"
#include "core/memory/arena_file.hpp"
#include "core/messages/request.hpp"
#include "core/protocol/configuration.hpp"
#include "core/protocol/member_status.hpp"

namespace opensmd {

struct GroupParts;

// Collectives block the caller and must be called by one thread at a time, in the same order by all members.
// Point-to-point calls may come from any thread, even during a collective. A null pointer is fine where the count is 0.
// `counts` are in elements. Inputs and outputs must not overlap, except exactly: in == out for reduce, and the input
// may be the caller's own slice of the output of all_gather or of the input of reduce_scatter (in place).
class Group {
 public:
  explicit Group(GroupConfig config);  // maps the file, publishes this process; does not wait for the others
  ~Group();                            // leave(), then unmaps: memory from heap_allocate must be out of use
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const;
  int size() const;

  void barrier(const Call& call = {});
  // In place. `factor` is this member's multiplier for PremulSum.
  void all_reduce(void* data, size_t count, DType dtype, Reduction reduction, double factor = 1.0,
                  const Call& call = {});
  // `out` matters only on the root (null elsewhere); `in` is left unchanged unless it is `out`.
  void reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root,
              double factor = 1.0, const Call& call = {});
  void broadcast(void* data, size_t count, DType dtype, int root, const Call& call = {});
  // outs[i] takes counts[i] elements from member i; counts is the same everywhere; `in` has counts[rank()].
  void all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call = {});
  // Every member gives `count` elements; outs matters only on the root.
  void gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call = {});
  void scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call = {});
  // ins[i] (counts[i] elements) is reduced over all members into member i's `out`; counts is the same everywhere.
  void reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                      double factor = 1.0, const Call& call = {});
  // ins[i] goes to member i. in_counts[j] here must equal out_counts[rank()] on member j.
  void all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                  DType dtype, const Call& call = {});

  // Memory of this member's heap: collectives recognize a tensor there by its address and move it without staging.
  // Offsets may differ between members. nullptr when the heap, or the memory behind it, is full. Any thread; 4096-byte
  // aligned.
  void* heap_allocate(size_t bytes);
  void heap_free(void* block);
  bool heap_contains(const void* address) const;
  uint64_t heap_offset(const void* address) const;  // of an address in this member's heap
  // A range of a member's heap as mapped in this process. Throws std::out_of_range.
  void* heap_address(int member, uint64_t offset, size_t bytes) const;

  // Messages between one pair with one tag keep their order. Both calls return at once; sends of any size may be posted
  // before any receive. A receive whose buffer differs from the message in size or dtype (see may_become) fails with
  // Mismatch and consumes the message. timeout applies to wait().
  std::shared_ptr<Request> post_send(const void* data, size_t bytes, int destination, int64_t tag,
                                     DType dtype = DType::Byte);
  std::shared_ptr<Request> post_receive(void* data, size_t bytes, int source, int64_t tag, DType dtype = DType::Byte);
  // For members that also receive from outside the group. Returns null if the receiver has closed its inbox: then this
  // send and all later ones must go another way.
  std::shared_ptr<Request> post_send_if_open(const void* data, size_t bytes, int destination, int64_t tag, DType dtype);
  // Once this returns, nothing more is on its way to this member. Receives whose message has not come are withdrawn:
  // done, with is_withdrawn() true.
  void close_inbox(milliseconds timeout = milliseconds{0});
  static bool is_withdrawn(const Request& request);
  // Only from what has arrived; null if nothing matches.
  std::shared_ptr<Request> post_receive_of_arrived(void* data, size_t bytes, int source, int64_t tag, DType dtype);
  // Whether a message has begun to arrive; stores its size in *bytes and its sender in *from, if given.
  bool ready(int source, int64_t tag, size_t* bytes = nullptr, int* from = nullptr);
  // Sleeps until ready() holds for one of the (source, tag) pairs; returns its index.
  size_t wait_ready(const std::vector<std::pair<int, int64_t>>& wanted, milliseconds timeout = milliseconds{0});
  // Waits until one request is done; returns its index.
  size_t wait_any(const std::vector<std::shared_ptr<Request>>& requests, milliseconds timeout = milliseconds{0});

  // For later calls that give none. Any thread.
  void set_timeout(milliseconds timeout);

  // Every later call, and every call in progress, fails on every member with the first cause.
  void abort(const std::string& reason);
  bool aborted() const;
  // Leaves: others that still need this member get an error that says so. No call may follow but heap_free.
  void leave();

  MemberStatus status(int member) const;
  std::vector<RecordEntry> record(int member) const;                 // collectives, oldest first
  std::vector<RecordEntry> message_record(int member) const;         // sends and receives, oldest first
  uint64_t sequence() const;                                          // of the last collective entered here
  // For the timeline: from now on, what ends goes into the process's EventLog under this number.
  void record_as(uint32_t group);

 private:
  std::unique_ptr<GroupParts> parts_;
};

}  // namespace opensmd
