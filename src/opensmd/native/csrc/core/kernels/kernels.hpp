// Element-wise reduction of several inputs into one or more outputs, for every dtype.
//
// Inputs are combined in the order given, element by element, so results do not depend on how an array was cut into
// parts. An output may be exactly one of the inputs. The instruction set is chosen at run time.
#pragma once

#include <cstddef>

#include "core/kernels/simd_level.hpp"
#include "core/kernels/types.hpp"

namespace opensmd {

struct NarrowFormat;

// How a job walks through memory. Results are the same; a kernel that knows no other way goes forwards.
enum class Walk {
  Forwards,
  Backwards,  // begins with what the last walk has left in the caches
  PastCache   // inputs and outputs are much larger than the caches
};

struct ReduceJob {
  void* const* outputs;
  int output_count;
  const void* const* inputs;
  int input_count;
  size_t count;           // elements (numbers, not pairs, for complex sums)
  double divisor;         // 1: none
  const double* factors;  // of each input, for PremulSum
  const NarrowFormat* format;  // of floats below 32 bits, with their width in bytes
  size_t width;
  Walk walk;
};

class Reducer {
 public:
  // Averages are divided by `members`. Throws std::invalid_argument if the reduction makes no sense.
  Reducer(DType dtype, Reduction reduction, int members, SimdLevel level = best_simd_level());

  void operator()(void* const* outputs, int output_count, const void* const* inputs, int input_count, size_t bytes,
                  const double* factors = nullptr, Walk walk = Walk::Forwards) const {
    kernel_(ReduceJob{outputs, output_count, inputs, input_count, bytes / unit_, divisor_, factors, format_, unit_,
                      walk});
  }

 private:
  void (*kernel_)(const ReduceJob&);
  const NarrowFormat* format_;
  size_t unit_;  // bytes per kernel element
  double divisor_;
};

// Whether results of some inputs, in the dtype itself, combine with the rest to the result of all, bit for bit (of
// PremulSum, whose inputs are multiplied first).
bool combines_in_parts(DType dtype, Reduction reduction);

}  // namespace opensmd
