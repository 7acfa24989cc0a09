#include "core/kernels/compression.hpp"

#include <bit>
#include <cstring>
#include <limits>

#include "core/kernels/narrow_floats.hpp"
#include "core/kernels/simd.hpp"

namespace opensmd {
namespace {

// A block in transit: its scale, then its numbers divided by the scale.
constexpr size_t kScaleBytes = sizeof(float);
// Blocks whose largest number is smaller become all zero: their scales would be too small to divide by.
constexpr float kSmallest = 0x1p-100f;
constexpr float kMost = 127.0f;

struct CompressBlocks {
  static OPENSMD_INLINE void run(void* out, const float* in, size_t count) {
    auto* to = static_cast<int8_t*>(out);
    while (count > 0) {
      const size_t length = count < kCompressionBlock ? count : kCompressionBlock;
      block(to, in, length);
      to += kScaleBytes + length;
      in += length;
      count -= length;
    }
  }

  static OPENSMD_INLINE void block(int8_t* to, const float* in, size_t length) {
    uint32_t bits = 0;  // of the largest: without sign bits, floats order like their bits
    for (size_t i = 0; i < length; ++i) {
      const uint32_t size = std::bit_cast<uint32_t>(in[i]) & 0x7fffffffu;
      bits = size > bits ? size : bits;
    }
    const float largest = std::bit_cast<float>(bits);
    const bool finite = bits < 0x7f800000u, scaled = finite && largest >= kSmallest;
    const float scale = scaled ? largest / kMost : finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    std::memcpy(to, &scale, kScaleBytes);
    to += kScaleBytes;
    if (!scaled) {
      std::memset(to, 0, length);
      return;
    }
    const float inverse = kMost / largest;
    // Adding this rounds: a number of this size has 1 as its last place.
    constexpr float kRounding = 0x1.8p23f;
    constexpr auto kRoundingBits = std::bit_cast<int32_t>(kRounding);
    for (size_t i = 0; i < length; ++i) {
      const float rounded = in[i] * inverse + kRounding;
      to[i] = static_cast<int8_t>(std::bit_cast<int32_t>(rounded) - kRoundingBits);
    }
  }
};

struct ExpandBlocks {
  static OPENSMD_INLINE void run(float* out, const void* in, size_t count) {
    const auto* from = static_cast<const int8_t*>(in);
    while (count > 0) {
      const size_t length = count < kCompressionBlock ? count : kCompressionBlock;
      float scale;
      std::memcpy(&scale, from, kScaleBytes);
      from += kScaleBytes;
      for (size_t i = 0; i < length; ++i) out[i] = scale * static_cast<float>(from[i]);
      from += length;
      out += length;
      count -= length;
    }
  }
};

}  // namespace

const char* name_of(Compression compression) {
  switch (compression) {
    case Compression::None: return "none";
    case Compression::Bf16: return "bf16";
    case Compression::Fp16: return "fp16";
    case Compression::Int8: return "int8";
  }
  return "?";
}

Compressor::Compressor(Compression compression, SimdLevel level) : compression_(compression) {
  if (compression == Compression::Int8) {
    compress_ = simd<CompressBlocks, Vectors::Whole, void*, const float*, size_t>(level);
    expand_ = simd<ExpandBlocks, Vectors::Whole, float*, const void*, size_t>(level);
    return;
  }
  const NarrowFormat* format = narrow_format(compression == Compression::Bf16 ? DType::BF16 : DType::F16, level);
  compress_ = format->narrow;
  expand_ = format->widen;
}

size_t Compressor::bytes(size_t count) const {
  if (compression_ != Compression::Int8) return 2 * count;
  return count + (count + kCompressionBlock - 1) / kCompressionBlock * kScaleBytes;
}

}  // namespace opensmd
