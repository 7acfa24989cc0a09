// How a reduction makes one element of two.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/kernels/simd.hpp"

namespace opensmd::elements {

struct Add {
  template <class T>
  static OPENSMD_INLINE T apply(T a, T b) { return static_cast<T>(a + b); }
};
struct Multiply {
  template <class T>
  static OPENSMD_INLINE T apply(T a, T b) {
    // Small unsigned numbers are promoted to int, whose overflow is undefined.
    if constexpr (std::is_integral_v<T> && sizeof(T) < 4) return static_cast<T>(uint32_t{a} * uint32_t{b});
    return static_cast<T>(a * b);
  }
};
// A NaN on either side is kept, as in torch. No "||", whose jump would prevent vectorization.
struct Minimum {
  template <class T>
  static OPENSMD_INLINE T apply(T a, T b) { return (b < a) | (b != b) ? b : a; }
};
struct Maximum {
  template <class T>
  static OPENSMD_INLINE T apply(T a, T b) { return (b > a) | (b != b) ? b : a; }
};
struct And {
  static OPENSMD_INLINE uint8_t apply(uint8_t a, uint8_t b) { return a & b; }
};
struct Or {
  static OPENSMD_INLINE uint8_t apply(uint8_t a, uint8_t b) { return a | b; }
};
struct Xor {
  static OPENSMD_INLINE uint8_t apply(uint8_t a, uint8_t b) { return a ^ b; }
};

template <class Real>
struct Complex {
  Real real, imaginary;
};
template <class Real>
OPENSMD_INLINE Complex<Real> operator*(Complex<Real> a, Complex<Real> b) {
  return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

}  // namespace opensmd::elements
