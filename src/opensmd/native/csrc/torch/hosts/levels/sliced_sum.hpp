// What large all_reduces share, whichever way sums cross: each host reduces a part in shared memory, one slice per
// member that crosses, and gathers the slices at the end. Members with the same place on all hosts exchange messages.
#pragma once

#include "torch/hosts/levels/levels.hpp"
#include "torch/hosts/levels/parts.hpp"
#include "torch/hosts/levels/two_sums.hpp"

namespace opensmd::levels {

class SlicedSum {
 protected:
  SlicedSum(Levels& on, const Calling& calling, void* data, Reduction reduction, double factor)
      : on_(on),
        calling_(calling),
        dtype_(calling.signature.dtype),
        sums_(on.layout, dtype_, reduction, factor),
        data_(static_cast<char*>(data)) {}

  size_t bytes() const { return calling_.signature.count * size_of(dtype_); }

  // On the host `step` behind this one; only for members that cross.
  int counterpart(int step) const { return on_.layout.members(on_.layout.after(step))[place()]; }

  // This member's slice of a part; a member without one does not cross.
  char* slice(const Slices& slices) const { return slices.data[place()]; }
  size_t slice_bytes(const Slices& slices) const { return slices.counts[place()] * size_of(dtype_); }
  bool crosses(const Slices& slices) const { return slice_bytes(slices) > 0; }

  void add_up_here(const Slices& slices) const {
    on_.local.reduce_scatter(slices.inputs(), slices.counts.data(), slice(slices), dtype_, sums_.here, sums_.factor,
                             calling_.call);
  }
  void gather_here(const Slices& slices) const {
    on_.local.all_gather(slice(slices), slices.outputs(), slices.counts.data(), dtype_, calling_.call);
  }

  Levels& on_;
  const Calling& calling_;
  const DType dtype_;
  const TwoSums sums_;
  char* const data_;

 private:
  size_t place() const { return static_cast<size_t>(on_.layout.place()); }
};

}  // namespace opensmd::levels
