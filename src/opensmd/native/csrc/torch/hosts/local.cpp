#include "torch/hosts/local.hpp"

#include <cstring>

#include "core/kernels/kernels.hpp"

namespace opensmd {
namespace {

constexpr milliseconds kForEachOther{1500};

Call longer(const Call& call) { return {call.text, for_each_other(call.timeout)}; }

void copy(void* to, const void* from, size_t count, DType dtype) {
  if (to != from && count > 0) std::memcpy(to, from, count * size_of(dtype));
}

void reduce_alone(const void* in, void* out, size_t count, DType dtype, Reduction reduction, double factor) {
  if (reduction != Reduction::PremulSum) return copy(out, in, count, dtype);
  if (count > 0) Reducer(dtype, reduction, 1)(&out, 1, &in, 1, count * size_of(dtype), &factor);
}

}  // namespace

milliseconds for_each_other(milliseconds timeout) { return timeout.count() > 0 ? timeout + kForEachOther : timeout; }

void Local::reduce(const void* in, void* out, size_t count, DType dtype, Reduction reduction, int root, double factor,
                   const Call& call) {
  if (alone()) return reduce_alone(in, out, count, dtype, reduction, factor);
  group_->reduce(in, out, count, dtype, reduction, root, factor, longer(call));
}

void Local::broadcast(void* data, size_t count, DType dtype, int root, const Call& call) {
  if (!alone()) group_->broadcast(data, count, dtype, root, longer(call));
}

void Local::all_gather(const void* in, void* const* outs, const size_t* counts, DType dtype, const Call& call) {
  if (alone()) return copy(outs[0], in, counts[0], dtype);
  group_->all_gather(in, outs, counts, dtype, longer(call));
}

void Local::gather(const void* in, void* const* outs, size_t count, DType dtype, int root, const Call& call) {
  if (alone()) return copy(outs[0], in, count, dtype);
  group_->gather(in, outs, count, dtype, root, longer(call));
}

void Local::scatter(const void* const* ins, void* out, size_t count, DType dtype, int root, const Call& call) {
  if (alone()) return copy(out, ins[0], count, dtype);
  group_->scatter(ins, out, count, dtype, root, longer(call));
}

void Local::reduce_scatter(const void* const* ins, const size_t* counts, void* out, DType dtype, Reduction reduction,
                           double factor, const Call& call) {
  if (alone()) return reduce_alone(ins[0], out, counts[0], dtype, reduction, factor);
  group_->reduce_scatter(ins, counts, out, dtype, reduction, factor, longer(call));
}

void Local::all_to_all(const void* const* ins, const size_t* in_counts, void* const* outs, const size_t* out_counts,
                       DType dtype, const Call& call) {
  if (alone()) return copy(outs[0], ins[0], in_counts[0], dtype);
  group_->all_to_all(ins, in_counts, outs, out_counts, dtype, longer(call));
}

void Local::abort(const std::string& reason) {
  if (group_) group_->abort(reason);
}

void Local::leave() {
  if (group_) group_->leave();
}

}  // namespace opensmd
