#include "core/algorithms/broadcast.hpp"

#include "core/algorithms/root.hpp"
#include "core/protocol/exchange.hpp"

namespace opensmd {

namespace {

class FromRoot : public Traffic {
 public:
  FromRoot(int root, size_t bytes) : root_(root), bytes_(bytes) {}
  size_t bytes(int source, int destination) const override {
    return source == root_ && destination != root_ ? bytes_ : 0;
  }
  size_t largest(int) const override { return bytes_; }
  bool shared() const override { return true; }
  int lanes(int) const override { return 1; }
  bool one_way() const override { return true; }

 private:
  int root_;
  size_t bytes_;
};

}  // namespace

void broadcast(Context& context, const BroadcastOptions& options, const Call& call) {
  check_root(context, Operation::Broadcast, options.root);
  Signature signature;
  signature.operation = Operation::Broadcast;
  signature.dtype = options.dtype;
  signature.root = options.root;
  signature.count = options.count;
  Round round(context, signature, call);
  const FromRoot traffic(options.root, options.count * size_of(options.dtype));
  const void* inputs[kMaxMembers];
  void* outputs[kMaxMembers];
  for (int i = 0; i < context.size; ++i) inputs[i] = outputs[i] = options.data;
  CopyingExchange(context, round, traffic, inputs, outputs).run();
}

}  // namespace opensmd
