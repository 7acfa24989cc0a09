#include "core/algorithms/all_gather.hpp"

#include "core/algorithms/counts.hpp"
#include "core/protocol/exchange.hpp"

namespace opensmd {

namespace {

class FromAll : public Traffic {
 public:
  FromAll(const size_t* counts, size_t element) : counts_(counts), element_(element) {}
  size_t bytes(int source, int) const override { return counts_[source] * element_; }
  size_t largest(int source) const override { return counts_[source] * element_; }
  bool shared() const override { return true; }
  int lanes(int) const override { return 1; }

 private:
  const size_t* counts_;
  size_t element_;
};

}  // namespace

void all_gather(Context& context, const AllGatherOptions& options, const Call& call) {
  Signature signature;
  signature.operation = Operation::AllGather;
  signature.dtype = options.dtype;
  signature.count = options.counts[0];
  signature.shape_hash = hash_of_counts(options.counts, context.size);
  Round round(context, signature, call);
  const FromAll traffic(options.counts, size_of(options.dtype));
  const void* inputs[kMaxMembers];
  for (int i = 0; i < context.size; ++i) inputs[i] = options.in;
  CopyingExchange(context, round, traffic, inputs, options.outs).run();
}

}  // namespace opensmd
