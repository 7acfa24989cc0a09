#include "core/algorithms/reduce_scatter.hpp"

#include <algorithm>
#include <numeric>

#include "core/algorithms/counts.hpp"
#include "core/algorithms/factors.hpp"
#include "core/kernels/kernels.hpp"
#include "core/memory/copy.hpp"
#include "core/protocol/exchange.hpp"

namespace opensmd {

namespace {

class PartsToEach : public Traffic {
 public:
  PartsToEach(const size_t* counts, int size, size_t element)
      : counts_(counts), element_(element), largest_(*std::max_element(counts, counts + size) * element) {}
  size_t bytes(int, int destination) const override { return counts_[destination] * element_; }
  size_t largest(int) const override { return largest_; }
  bool shared() const override { return false; }
  int lanes(int size) const override { return size - 1; }

 private:
  const size_t* counts_;
  size_t element_;
  size_t largest_;
};

// Pieces are reduced step by step as they arrive; pieces that need no streaming are read in the same steps.
class ReducingExchange : public Exchange {
 public:
  ReducingExchange(Context& context, Round& round, const Traffic& traffic, const ReduceScatterOptions& options,
                   const Reducer& reducer)
      : Exchange(context, round, traffic, options.ins), out_(static_cast<std::byte*>(options.out)), reducer_(reducer),
        factors_(context, round.sequence(), options.reduction, options.factor),
        past_cache_(traffic.bytes(context.rank, context.rank) >= kPastCacheBytes) {}

 protected:
  void take_direct() override {
    const Source& own = sources_[context_.rank];
    if (own.bytes > 0 && first_streaming() < 0) reduce(0, own.bytes, 0);
  }

  void take_step(uint32_t step) override {
    const Source& source = sources_[first_streaming()];
    const size_t offset = step * source.step_bytes;
    if (offset < source.bytes) reduce(offset, std::min(source.step_bytes, source.bytes - offset), step);
  }

 private:
  int first_streaming() const {
    for (int s = 0; s < context_.size; ++s) {
      if (s != context_.rank && streams(s)) return s;
    }
    return -1;
  }

  void reduce(size_t offset, size_t bytes, uint32_t step) {
    const void* inputs[kMaxMembers];
    for (int s = 0; s < context_.size; ++s) {
      inputs[s] = s == context_.rank ? own_piece() + offset
                  : streams(s)       ? streamed(s, step)
                                     : sources_[s].piece + offset;
    }
    void* outputs[1] = {out_ + offset};
    reducer_(outputs, 1, inputs, context_.size, bytes, factors_.all(),
             past_cache_ ? Walk::PastCache : Walk::Forwards);
  }

  std::byte* const out_;
  const Reducer& reducer_;
  Factors factors_;
  const bool past_cache_;
};

}  // namespace

void reduce_scatter(Context& context, const ReduceScatterOptions& options, const Call& call) {
  const Reducer reducer(options.dtype, options.reduction, context.size);
  Signature signature;
  signature.operation = Operation::ReduceScatter;
  signature.dtype = options.dtype;
  signature.reduction = options.reduction;
  signature.count = std::accumulate(options.counts, options.counts + context.size, size_t{0});
  signature.shape_hash = hash_of_counts(options.counts, context.size);
  Round round(context, signature, call);
  const PartsToEach traffic(options.counts, context.size, size_of(options.dtype));
  ReducingExchange(context, round, traffic, options, reducer).run();
}

}  // namespace opensmd
