#include "core/algorithms/all_reduce.hpp"

#include <cstring>

#include "core/algorithms/factors.hpp"
#include "core/algorithms/pipelines/chain.hpp"
#include "core/algorithms/pipelines/two_shot.hpp"
#include "core/memory/copy.hpp"
#include "core/memory/parts.hpp"
#include "core/protocol/placement.hpp"

namespace opensmd {

namespace {

constexpr size_t kZeroCopyBlock = size_t{256} << 10;
// A chain has 16 chunks under way, which would not keep many more cores busy.
constexpr int kMostChainCores = 8;
constexpr size_t kEvenChainBytes = size_t{4} << 20;

class AllReduce {
 public:
  AllReduce(Context& context, Round& round, const AllReduceOptions& options, const Reducer& reducer)
      : context_(context), round_(round), reducer_(reducer), data_(static_cast<std::byte*>(options.data)),
        bytes_(options.count * size_of(options.dtype)), dtype_(options.dtype), reduction_(options.reduction),
        factors_(context, round.sequence(), options.reduction, options.factor) {}

  void run() {
    if (bytes_ <= kInlineBytes) return through_entry_lines();
    if (context_.size == 1) return alone();
    const bool small = bytes_ <= one_shot_limit();
    Placement placement;
    const bool in_heap = place_in_heap(context_, data_, bytes_, placement);
    if (small && !in_heap) {
      placement.offset = context_.stage.place(round_.sequence(), bytes_);
      copy_bytes(context_.stage.at(placement.offset), data_, bytes_);
    }
    placement.first_slot = two_shot_slot(context_, bytes_);
    placement.chain = prefers_chain();
    announce(round_, placement);
    round_.post();
    round_.meet();
    const int heaps = members_in_heap(context_, round_);
    if (heaps == context_.size) return zero_copy();
    // Only some are in the heap: those have staged nothing, and must not change while they are read.
    if (small && heaps == 0) return one_shot();
    if (all_prefer_chain()) return chain(context_, round_, {data_, bytes_, dtype_, reduction_});
    two_shot(context_, round_, reducer_, {data_, data_, bytes_, -1, factors_.all()});
  }

 private:
  // Every member reads every array, which pays only while it costs less than another wait for all others.
  size_t one_shot_limit() const {
    return std::min(context_.arena.shape().staging_bytes, context_.size == 2 ? kPage : 8 * kPage);
  }

  // Where cores have equally many members, all of them are busy in a two-shot, too.
  bool prefers_chain() const {
    const int size = context_.size, cores = context_.cores;
    if (reduction_ == Reduction::PremulSum || !combines_in_parts(dtype_, reduction_)) return false;
    if (size <= cores || cores > kMostChainCores) return false;
    return size % cores != 0 || (size >= 4 * cores && bytes_ >= kEvenChainBytes);
  }

  bool all_prefer_chain() const {
    bool all = true;
    for (int i = 0; i < context_.size; ++i) all = all && announced(round_, i).chain != 0;
    return all;
  }

  void through_entry_lines() {
    if (bytes_ > 0) std::memcpy(round_.payload(), data_, bytes_);
    round_.post();
    round_.meet();
    if (bytes_ == 0) return;
    const void* inputs[kMaxMembers];
    for (int i = 0; i < context_.size; ++i) inputs[i] = round_.payload_of(i);
    reduce_into_data(inputs);
  }

  void alone() {
    round_.post();
    const void* inputs[1] = {data_};
    reduce_into_data(inputs);
  }

  void one_shot() {
    const void* inputs[kMaxMembers];
    for (int i = 0; i < context_.size; ++i) {
      inputs[i] = i == context_.rank ? data_ : context_.arena.stage(i) + announced(round_, i).offset;
    }
    reduce_into_data(inputs);
  }

  void reduce_into_data(const void* const* inputs) {
    void* outputs[1] = {data_};
    reducer_(outputs, 1, inputs, context_.size, bytes_, factors_.all());
  }

  // Each member reduces its part straight from and into all members' tensors, alternately from its beginning and from
  // its end, which the last call has left in the caches: line by line if the kernel can walk backwards, else block by
  // block.
  void zero_copy() {
    const Part part = part_of(bytes_, context_.size, context_.rank);
    const size_t blocks = (part.bytes + kZeroCopyBlock - 1) / kZeroCopyBlock;
    const bool backwards = round_.sequence() & 1;
    for (size_t i = 0; i < blocks; ++i) {
      const size_t offset = (backwards ? blocks - 1 - i : i) * kZeroCopyBlock;
      void* tensors[kMaxMembers];
      for (int m = 0; m < context_.size; ++m) tensors[m] = tensor_in_heap(context_, round_, m) + part.offset + offset;
      reducer_(tensors, context_.size, tensors, context_.size, std::min(kZeroCopyBlock, part.bytes - offset),
               factors_.all(), backwards ? Walk::Backwards : Walk::Forwards);
    }
    finish_together(context_, round_);
  }

  Context& context_;
  Round& round_;
  const Reducer& reducer_;
  std::byte* const data_;
  const size_t bytes_;
  const DType dtype_;
  const Reduction reduction_;
  Factors factors_;
};

}  // namespace

void all_reduce(Context& context, const AllReduceOptions& options, const Call& call) {
  const Reducer reducer(options.dtype, options.reduction, context.size);
  Signature signature;
  signature.operation = Operation::AllReduce;
  signature.dtype = options.dtype;
  signature.reduction = options.reduction;
  signature.count = options.count;
  Round round(context, signature, call);
  AllReduce(context, round, options, reducer).run();
}

}  // namespace opensmd
