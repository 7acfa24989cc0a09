// f16, bf16 and the four f8 formats to f32 and back (round to nearest even, as torch rounds).
#pragma once

#include "core/kernels/kernels.hpp"

namespace opensmd {

struct NarrowFormat {
  void (*widen)(float* out, const void* in, size_t count);
  void (*narrow)(void* out, const float* in, size_t count);
};

const NarrowFormat* narrow_format(DType dtype, SimdLevel level);  // nullptr for other dtypes

}  // namespace opensmd
