// What large reduce_scatters share, whichever way sums cross: each host reduces in shared memory what is for one host's
// members, one slice per member of its own. Slices go in parts.
#pragma once

#include <algorithm>
#include <vector>

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {

// In bytes, given the element count for each member.
inline size_t largest_slice(const Layout& layout, const Signature& signature, const size_t* counts) {
  return *std::max_element(counts, counts + layout.size()) * size_of(signature.dtype);
}

class ScatteredSum {
 protected:
  ScatteredSum(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out, double factor,
               Parts parts)
      : on_(on),
        calling_(calling),
        dtype_(calling.signature.dtype),
        width_(size_of(dtype_)),
        sums_(on.layout, dtype_, calling.signature.reduction, factor),
        ins_(ins),
        counts_(counts),
        out_(static_cast<char*>(out)),
        me_(on.layout.member()),
        parts_(parts) {}

  Part part_of_slice(size_t index, int member) const {
    const size_t bytes = counts_[member] * width_, offset = std::min(bytes, index * parts_.each);
    return {offset, std::min(parts_.each, bytes - offset)};
  }

  // Reduces what is for a host's members from `row` on, each on the member of this host that has its place; returns the
  // bytes of this member's sum.
  size_t add_up_here(size_t index, const std::vector<int>& members, size_t row, void* sum) const {
    std::vector<const void*> ins;
    std::vector<size_t> counts;
    for (size_t place = 0; place < on_.layout.here().size(); ++place) {
      const int member = row + place < members.size() ? members[row + place] : -1;
      const auto [offset, bytes] = member < 0 ? Part{0, 0} : part_of_slice(index, member);
      ins.push_back(member < 0 ? nullptr : static_cast<const char*>(ins_[member]) + offset);
      counts.push_back(bytes / width_);
    }
    on_.local.reduce_scatter(ins.data(), counts.data(), sum, dtype_, sums_.here, sums_.factor, calling_.call);
    return counts[static_cast<size_t>(on_.layout.place())] * width_;
  }

  Levels& on_;
  const Calling& calling_;
  const DType dtype_;
  const size_t width_;
  const TwoSums sums_;
  const void* const* const ins_;
  const size_t* const counts_;
  char* const out_;
  const int me_;
  const Parts parts_;  // of the largest slice; smaller ones have less in their last parts
};

}  // namespace opensmd::levels
