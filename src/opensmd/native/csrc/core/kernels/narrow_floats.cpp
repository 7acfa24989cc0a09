#include "core/kernels/narrow_floats.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/kernels/simd.hpp"

namespace opensmd {

namespace {

OPENSMD_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

OPENSMD_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct WidenBf16 {
  static OPENSMD_INLINE void run(float* out, const void* in, size_t count) {
    const uint16_t* from = static_cast<const uint16_t*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
  }
};

struct NarrowBf16 {
  static OPENSMD_INLINE void run(void* out, const float* in, size_t count) {
    uint16_t* to = static_cast<uint16_t*>(out);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(in[i]);
      const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
  }
};

struct WidenF16 {
  static OPENSMD_INLINE void run(float* out, const void* in, size_t count) {
    const uint16_t* from = static_cast<const uint16_t*>(in);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t half = from[i];
      const uint32_t bits = (half & 0x7fffu) << 13;
      const uint32_t infinite = bits >= 0x0f800000u ? 0x7f800000u : 0u;
      // The multiplication moves the exponent to f32's bias and normalises subnormal numbers.
      out[i] = float_of((half & 0x8000u) << 16 | bits_of(float_of(bits) * 0x1p112f) | infinite);
    }
  }
};

struct NarrowF16 {
  static OPENSMD_INLINE void run(void* out, const float* in, size_t count) {
    uint16_t* to = static_cast<uint16_t*>(out);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(in[i]);
      const uint32_t size = bits & 0x7fffffffu;
      const uint32_t normal = (size + 0xc8000fffu + (size >> 13 & 1u)) >> 13;
      const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
      const uint32_t huge = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
      const uint32_t finite = size < 0x38800000u ? subnormal : normal;
      to[i] = static_cast<uint16_t>((size >= 0x47800000u ? huge : finite) | (bits >> 16 & 0x8000u));
    }
  }
};

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) void widen_f16_hardware(float* out, const void* in, size_t count) {
  const uint16_t* from = static_cast<const uint16_t*>(in);
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  WidenF16::run(out + i, from + i, count - i);
}

__attribute__((target("avx2,f16c"))) void narrow_f16_hardware(void* out, const float* in, size_t count) {
  uint16_t* to = static_cast<uint16_t*>(out);
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  NarrowF16::run(to + i, in + i, count - i);
}
#endif

// An 8-bit format: sign, exponent, `Mantissa` bits. `Last` is the largest finite code; "fnuz" formats have one NaN
// (0x80), no infinity and no negative zero. Numbers too large become `Overflow`, as in torch.
template <int Mantissa, int Bias, uint32_t Last, uint32_t Overflow, uint32_t NotANumber, bool Fnuz>
struct Eight {
  static OPENSMD_INLINE float widen(uint32_t code) {
    const float sign = code & 0x80u ? -1.0f : 1.0f;
    const uint32_t size = code & 0x7fu;
    if (Fnuz && code == 0x80u) return float_of(0x7fc00000u);
    if (!Fnuz && size > Last) return size == Overflow && Overflow != NotANumber ? sign * float_of(0x7f800000u)
                                                                                : float_of(0x7fc00000u);
    const uint32_t exponent = size >> Mantissa;
    const float fraction = static_cast<float>(size & ((1u << Mantissa) - 1u));
    if (exponent == 0) return sign * fraction * float_of(static_cast<uint32_t>(127 + 1 - Bias - Mantissa) << 23);
    const float significand = fraction + static_cast<float>(1u << Mantissa);
    return sign * significand * float_of((exponent + static_cast<uint32_t>(127 - Bias - Mantissa)) << 23);
  }

  static OPENSMD_INLINE uint8_t narrow(float value) {
    constexpr int kDropped = 23 - Mantissa;
    const uint32_t bits = bits_of(value);
    const uint32_t size = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 24 & 0x80u;
    if (size > 0x7f800000u) return static_cast<uint8_t>(Fnuz ? 0x80u : NotANumber | sign);
    const uint32_t odd = size >> kDropped & 1u;
    const uint32_t normal = ((size + (1u << (kDropped - 1)) - 1u + odd) >> kDropped) -
                            (static_cast<uint32_t>(127 - Bias) << Mantissa);
    // Adding a number whose last place is the format's smallest step makes the hardware round.
    constexpr uint32_t kStep = static_cast<uint32_t>(127 + 1 - Bias - Mantissa + 23) << 23;
    const uint32_t subnormal = bits_of(float_of(size) + float_of(kStep)) - kStep;
    uint32_t code = size < (static_cast<uint32_t>(127 + 1 - Bias) << 23) ? subnormal : normal;
    if (code > Last) return static_cast<uint8_t>(Fnuz ? 0x80u : Overflow | sign);
    return static_cast<uint8_t>(Fnuz && code == 0 ? 0u : code | sign);
  }
};

template <class Format>
struct WidenEight {
  static OPENSMD_INLINE void run(float* out, const void* in, size_t count) {
    const uint8_t* from = static_cast<const uint8_t*>(in);
    for (size_t i = 0; i < count; ++i) out[i] = Format::widen(from[i]);
  }
};

template <class Format>
struct NarrowEight {
  static OPENSMD_INLINE void run(void* out, const float* in, size_t count) {
    uint8_t* to = static_cast<uint8_t*>(out);
    for (size_t i = 0; i < count; ++i) to[i] = Format::narrow(in[i]);
  }
};

using E4M3FN = Eight<3, 7, 0x7e, 0x7f, 0x7f, false>;
using E5M2 = Eight<2, 15, 0x7b, 0x7c, 0x7f, false>;
using E4M3FNUZ = Eight<3, 8, 0x7f, 0x80, 0x80, true>;
using E5M2FNUZ = Eight<2, 16, 0x7f, 0x80, 0x80, true>;

template <class Widen, class Narrow>
NarrowFormat make_format(SimdLevel level) {
  return {simd<Widen, Vectors::Whole, float*, const void*, size_t>(level),
          simd<Narrow, Vectors::Whole, void*, const float*, size_t>(level)};
}

template <class Widen, class Narrow>
const NarrowFormat* format_for(SimdLevel level) {
  static const NarrowFormat formats[] = {make_format<Widen, Narrow>(SimdLevel::Generic),
                                         make_format<Widen, Narrow>(SimdLevel::Avx2),
                                         make_format<Widen, Narrow>(SimdLevel::Avx512)};
  return &formats[static_cast<int>(level)];
}

template <class Format>
const NarrowFormat* eight_for(SimdLevel level) {
  return format_for<WidenEight<Format>, NarrowEight<Format>>(level);
}

const NarrowFormat* half_for(SimdLevel level) {
#if defined(__x86_64__)
  static const NarrowFormat hardware{widen_f16_hardware, narrow_f16_hardware};
  if (level != SimdLevel::Generic) return &hardware;
#endif
  return format_for<WidenF16, NarrowF16>(level);
}

}  // namespace

const NarrowFormat* narrow_format(DType dtype, SimdLevel level) {
  switch (dtype) {
    case DType::F16: return half_for(level);
    case DType::BF16: return format_for<WidenBf16, NarrowBf16>(level);
    case DType::F8E4M3FN: return eight_for<E4M3FN>(level);
    case DType::F8E5M2: return eight_for<E5M2>(level);
    case DType::F8E4M3FNUZ: return eight_for<E4M3FNUZ>(level);
    case DType::F8E5M2FNUZ: return eight_for<E5M2FNUZ>(level);
    default: return nullptr;
  }
}

}  // namespace opensmd
