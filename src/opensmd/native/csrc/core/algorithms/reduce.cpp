#include "core/algorithms/reduce.hpp"

#include <cstring>

#include "core/algorithms/factors.hpp"
#include "core/algorithms/pipelines/two_shot.hpp"
#include "core/algorithms/root.hpp"
#include "core/memory/copy.hpp"
#include "core/memory/parts.hpp"
#include "core/protocol/placement.hpp"

namespace opensmd {

namespace {

class Reduce {
 public:
  Reduce(Context& context, Round& round, const ReduceOptions& options, const Reducer& reducer)
      : context_(context), round_(round), reducer_(reducer), options_(options),
        in_(static_cast<const std::byte*>(options.in)), out_(static_cast<std::byte*>(options.out)),
        bytes_(options.count * size_of(options.dtype)), is_root_(options.root == context.rank),
        factors_(context, round.sequence(), options.reduction, options.factor) {}

  void run() {
    const bool small = bytes_ <= context_.arena.shape().staging_bytes;
    if (bytes_ <= kInlineBytes) {
      if (bytes_ > 0) std::memcpy(round_.payload(), in_, bytes_);
    } else {
      Placement placement;
      const bool in_heap = (!is_root_ || in_ == out_) && place_in_heap(context_, in_, bytes_, placement);
      if (small && !in_heap && !is_root_) {
        placement.offset = context_.stage.place(round_.sequence(), bytes_);
        copy_bytes(context_.stage.at(placement.offset), in_, bytes_);
      }
      placement.first_slot = two_shot_slot(context_, bytes_);
      announce(round_, placement);
    }
    round_.post();
    round_.meet();
    if (bytes_ == 0) return;
    const int heaps = bytes_ > kInlineBytes ? members_in_heap(context_, round_) : 0;
    if (context_.size == 1 || (small && heaps == 0)) {
      if (is_root_) reduce_staged();
    } else if (heaps == context_.size) {
      zero_copy();
    } else {
      two_shot(context_, round_, reducer_, {in_, is_root_ ? out_ : nullptr, bytes_, options_.root, factors_.all()});
    }
  }

 private:
  void reduce_staged() {
    const void* inputs[kMaxMembers];
    for (int i = 0; i < context_.size; ++i) {
      inputs[i] = bytes_ <= kInlineBytes ? round_.payload_of(i)
                                         : context_.arena.stage(i) + announced(round_, i).offset;
    }
    inputs[context_.rank] = in_;
    void* outputs[1] = {out_};
    reducer_(outputs, 1, inputs, context_.size, bytes_, factors_.all());
  }

  // Each member reduces its part of all members' tensors straight into the root's.
  void zero_copy() {
    const Part part = part_of(bytes_, context_.size, context_.rank);
    void* tensors[kMaxMembers];
    for (int i = 0; i < context_.size; ++i) tensors[i] = tensor_in_heap(context_, round_, i) + part.offset;
    reducer_(&tensors[options_.root], 1, tensors, context_.size, part.bytes, factors_.all());
    finish_together(context_, round_);
  }

  Context& context_;
  Round& round_;
  const Reducer& reducer_;
  const ReduceOptions options_;
  const std::byte* const in_;
  std::byte* const out_;
  const size_t bytes_;
  const bool is_root_;
  Factors factors_;
};

}  // namespace

void reduce(Context& context, const ReduceOptions& options, const Call& call) {
  check_root(context, Operation::Reduce, options.root);
  const Reducer reducer(options.dtype, options.reduction, context.size);
  Signature signature;
  signature.operation = Operation::Reduce;
  signature.dtype = options.dtype;
  signature.reduction = options.reduction;
  signature.root = options.root;
  signature.count = options.count;
  Round round(context, signature, call);
  Reduce(context, round, options, reducer).run();
}

}  // namespace opensmd
