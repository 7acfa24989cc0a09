// f16, bf16 and the four f8 formats to f32 and back (round to nearest even, as torch rounds).
#pragma once

#include <cstddef>

#include "core/kernels/simd_level.hpp"
#include "core/kernels/types.hpp"

namespace opensmd {

struct NarrowFormat {
  void (*widen)(float* out, const void* in, size_t count);
  void (*narrow)(void* out, const float* in, size_t count);
};

const NarrowFormat* narrow_format(DType dtype, SimdLevel level);  // nullptr for other dtypes

}  // namespace opensmd
