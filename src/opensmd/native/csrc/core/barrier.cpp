#include "barrier.hpp"

#include "round.hpp"

namespace opensmd {

void barrier(Context& context, const Call& call) {
  Signature signature;
  signature.operation = Operation::Barrier;
  Round round(context, signature, call);
  round.post();
  round.meet();
}

}  // namespace opensmd
