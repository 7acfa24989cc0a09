#include "core/algorithms/scatter.hpp"

#include "core/algorithms/root.hpp"
#include "core/protocol/exchange.hpp"

namespace opensmd {

namespace {

class FromRootToEach : public Traffic {
 public:
  FromRootToEach(int root, size_t bytes) : root_(root), bytes_(bytes) {}
  size_t bytes(int source, int) const override { return source == root_ ? bytes_ : 0; }
  size_t largest(int) const override { return bytes_; }
  bool shared() const override { return false; }
  int lanes(int size) const override { return size - 1; }

 private:
  int root_;
  size_t bytes_;
};

}  // namespace

void scatter(Context& context, const ScatterOptions& options, const Call& call) {
  check_root(context, Operation::Scatter, options.root);
  Signature signature;
  signature.operation = Operation::Scatter;
  signature.dtype = options.dtype;
  signature.root = options.root;
  signature.count = options.count;
  Round round(context, signature, call);
  const FromRootToEach traffic(options.root, options.count * size_of(options.dtype));
  void* outputs[kMaxMembers];
  for (int i = 0; i < context.size; ++i) outputs[i] = options.out;
  CopyingExchange(context, round, traffic, options.ins, outputs).run();
}

}  // namespace opensmd
