#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {
namespace {

// A host's sum may be too large for a narrow float where the average is not, so it is divided before it is rounded.
bool divides_first(const Layout& layout, DType dtype, Reduction reduction) {
  return reduction == Reduction::Average && is_narrow(dtype) && layout.hosts() < layout.size();
}

Reduction in_the_first_step(const Layout& layout, DType dtype, Reduction reduction) {
  if (divides_first(layout, dtype, reduction)) return Reduction::PremulSum;
  return reduction == Reduction::Average ? Reduction::Sum : reduction;
}

Reduction in_the_second_step(Reduction reduction) {
  return reduction == Reduction::Average || reduction == Reduction::PremulSum ? Reduction::Sum : reduction;
}

Reduction in_the_last_step(const Layout& layout, DType dtype, Reduction reduction) {
  const bool divides = reduction == Reduction::Average && !divides_first(layout, dtype, reduction);
  return divides ? reduction : in_the_second_step(reduction);
}

}  // namespace

TwoSums::TwoSums(const Layout& layout, DType dtype, Reduction reduction, double own_factor)
    : here(in_the_first_step(layout, dtype, reduction)),
      factor(divides_first(layout, dtype, reduction) ? 1.0 / layout.size() : own_factor),
      between(in_the_second_step(reduction)),
      combine(dtype, between, layout.size()),
      conclude(dtype, in_the_last_step(layout, dtype, reduction), layout.size()) {}

bool TwoSums::serve(DType dtype, Reduction reduction) {
  return (is_narrow(dtype) && reduction != Reduction::Product) || combines_in_parts(dtype, reduction);
}

}  // namespace opensmd::levels
