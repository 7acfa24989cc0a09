#include "core/algorithms/gather.hpp"

#include "core/algorithms/root.hpp"
#include "core/protocol/exchange.hpp"

namespace opensmd {

namespace {

class ToRoot : public Traffic {
 public:
  ToRoot(int root, size_t bytes) : root_(root), bytes_(bytes) {}
  size_t bytes(int, int destination) const override { return destination == root_ ? bytes_ : 0; }
  size_t largest(int) const override { return bytes_; }
  bool shared() const override { return false; }
  int lanes(int) const override { return 1; }

 private:
  int root_;
  size_t bytes_;
};

}  // namespace

void gather(Context& context, const GatherOptions& options, const Call& call) {
  check_root(context, Operation::Gather, options.root);
  Signature signature;
  signature.operation = Operation::Gather;
  signature.dtype = options.dtype;
  signature.root = options.root;
  signature.count = options.count;
  Round round(context, signature, call);
  const ToRoot traffic(options.root, options.count * size_of(options.dtype));
  const void* inputs[kMaxMembers];
  for (int i = 0; i < context.size; ++i) inputs[i] = options.in;
  CopyingExchange(context, round, traffic, inputs, options.outs).run();
}

}  // namespace opensmd
