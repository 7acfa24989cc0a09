#include "core/algorithms/barrier.hpp"

#include "core/protocol/round.hpp"

namespace opensmd {

void barrier(Context& context, const Call& call) {
  Signature signature;
  signature.operation = Operation::Barrier;
  Round round(context, signature, call);
  round.post();
  round.meet();
}

}  // namespace opensmd
