// How a sum, or another reduction, is made in two steps: among the members of a host, then among hosts.
#pragma once

#include "core/kernels/kernels.hpp"
#include "torch/hosts/layout.hpp"

namespace opensmd::levels {

inline bool is_narrow(DType dtype) { return dtype == DType::F16 || dtype == DType::BF16; }

struct TwoSums {
  Reduction here;    // on one host
  double factor;     // of this member, for `here`
  Reduction between;  // among hosts, without an average's division
  Reducer combine;
  Reducer conclude;  // `between` with that division, for the last step

  TwoSums(const Layout& layout, DType dtype, Reduction reduction, double own_factor);

  // Whether two steps give the result of one, but for one more rounding of narrow floats.
  static bool serve(DType dtype, Reduction reduction);
};

}  // namespace opensmd::levels
