// float32 numbers in fewer bytes, for slow links: bf16, fp16, or int8 with one scale per block of numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kernels/simd_level.hpp"

namespace opensmd {

enum class Compression : uint8_t { None, Bf16, Fp16, Int8 };

const char* name_of(Compression compression);

// Numbers that share a scale in int8. The largest becomes 127 or -127; if one is infinite or NaN, all become NaN.
constexpr size_t kCompressionBlock = 256;

// Rounds to nearest even; the same bits on every instruction set. Numbers too large for fp16 become infinite.
class Compressor {
 public:
  explicit Compressor(Compression compression, SimdLevel level = best_simd_level());

  size_t bytes(size_t count) const;  // of `count` numbers
  void compress(void* out, const float* in, size_t count) const { compress_(out, in, count); }
  void expand(float* out, const void* in, size_t count) const { expand_(out, in, count); }

 private:
  Compression compression_;
  void (*compress_)(void*, const float*, size_t);
  void (*expand_)(float*, const void*, size_t);
};

}  // namespace opensmd
