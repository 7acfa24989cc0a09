// The expected results of reductions, computed one element at a time in the plainest way: numbers are decoded to
// double, combined in rank order, and encoded again by searching for the nearest code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/kernels/types.hpp"

namespace reference {

using opensmd::DType;
using opensmd::Reduction;

inline const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes = {
      DType::F32, DType::F64, DType::F16, DType::BF16, DType::I8, DType::I16, DType::I32, DType::I64, DType::U8,
      DType::U16, DType::U32, DType::U64, DType::Bool, DType::C64, DType::C128, DType::F8E4M3FN, DType::F8E5M2,
      DType::F8E4M3FNUZ, DType::F8E5M2FNUZ, DType::Byte};
  return dtypes;
}

inline const std::vector<Reduction>& all_reductions() {
  static const std::vector<Reduction> reductions = {
      Reduction::Sum, Reduction::Average, Reduction::Product, Reduction::Min, Reduction::Max,
      Reduction::BitAnd, Reduction::BitOr, Reduction::BitXor, Reduction::PremulSum};
  return reductions;
}

// A small binary float: `exponent_bits`, `mantissa_bits`, bias; "fnuz" and "fn" formats have no infinity.
struct FloatFormat {
  int exponent_bits, mantissa_bits, bias;
  bool fnuz, infinite;
  std::vector<double> table;
  const double* values;  // of all codes, computed once: the test tables decode millions of numbers
  uint32_t largest;      // code of the largest finite number

  FloatFormat(int exponent, int mantissa, int exponent_bias, bool is_fnuz, bool has_infinity)
      : exponent_bits(exponent), mantissa_bits(mantissa), bias(exponent_bias), fnuz(is_fnuz), infinite(has_infinity) {
    for (uint32_t code = 0; code < 2 * sign_bit(); ++code) table.push_back(compute_value(code));
    values = table.data();
    largest = sign_bit() - 1;
    while (!std::isfinite(values[largest])) --largest;
  }

  FloatFormat(const FloatFormat&) = delete;

  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }

  double compute_value(uint32_t code) const {
    if (fnuz && code == sign_bit()) return std::numeric_limits<double>::quiet_NaN();
    const double sign = code & sign_bit() ? -1.0 : 1.0;
    const uint32_t size = code & (sign_bit() - 1);
    const uint32_t exponent = size >> mantissa_bits;
    const uint32_t mantissa = size & ((1u << mantissa_bits) - 1);
    const uint32_t top = (1u << exponent_bits) - 1;
    if (infinite && exponent == top) {
      return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
    }
    if (!infinite && !fnuz && size == sign_bit() - 1) return std::numeric_limits<double>::quiet_NaN();
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1u << mantissa_bits), static_cast<int>(exponent) - bias - mantissa_bits);
  }
};

// Outside the function, which would otherwise check on each call whether they have been made.
inline const FloatFormat kF16{5, 10, 15, false, true}, kBF16{8, 7, 127, false, true}, kE4M3FN{4, 3, 7, false, false},
    kE5M2{5, 2, 15, false, true}, kE4M3FNUZ{4, 3, 8, true, false}, kE5M2FNUZ{5, 2, 16, true, false};

inline const FloatFormat* format_of(DType dtype) {
  switch (dtype) {
    case DType::F16: return &kF16;
    case DType::BF16: return &kBF16;
    case DType::F8E4M3FN: return &kE4M3FN;
    case DType::F8E5M2: return &kE5M2;
    case DType::F8E4M3FNUZ: return &kE4M3FNUZ;
    case DType::F8E5M2FNUZ: return &kE5M2FNUZ;
    default: return nullptr;
  }
}

// The sanitizer need not check accesses to tables that never change: they are most of the reference's work.
__attribute__((no_sanitize("thread"))) inline double decode(const FloatFormat& format, uint32_t code) {
  return format.values[code];
}

// The nearest code; of two equally near, the even one. Values stay far from overflow here.
__attribute__((no_sanitize("thread"))) inline uint32_t encode(const FloatFormat& format, double value) {
  uint32_t low = 0;
  uint32_t high = format.largest;
  const double size = std::fabs(value);
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (decode(format, middle) <= size ? low : high) = middle;
  }
  const double below = size - decode(format, low);
  const double above = decode(format, high) - size;
  uint32_t code = below < above ? low : above < below ? high : (low & 1 ? high : low);
  if (std::signbit(value) && !(format.fnuz && code == 0)) code |= format.sign_bit();
  return code;
}

// How many numbers an element of `dtype` has, and how to read and write number `i` of an array.
inline size_t numbers_in(DType dtype) { return dtype == DType::C64 || dtype == DType::C128 ? 2 : 1; }

template <class T>
double load(const void* data, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return static_cast<double>(value);
}

template <class T>
void store(void* data, size_t i, double number) {
  const T value = static_cast<T>(number);
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
}

inline double get(DType dtype, const void* data, size_t i) {
  if (const FloatFormat* format = format_of(dtype)) {
    const bool byte = opensmd::size_of(dtype) == 1;
    return decode(*format, byte ? static_cast<const uint8_t*>(data)[i] : static_cast<const uint16_t*>(data)[i]);
  }
  switch (dtype) {
    case DType::F32: case DType::C64: return load<float>(data, i);
    case DType::F64: case DType::C128: return load<double>(data, i);
    case DType::I8: return load<int8_t>(data, i);
    case DType::I16: return load<int16_t>(data, i);
    case DType::I32: return load<int32_t>(data, i);
    case DType::I64: return load<int64_t>(data, i);
    case DType::U16: return load<uint16_t>(data, i);
    case DType::U32: return load<uint32_t>(data, i);
    case DType::U64: return load<uint64_t>(data, i);
    default: return load<uint8_t>(data, i);
  }
}

inline void put(DType dtype, void* data, size_t i, double number) {
  if (const FloatFormat* format = format_of(dtype)) {
    const uint32_t code = encode(*format, number);
    if (opensmd::size_of(dtype) == 1) {
      static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(code);
    } else {
      static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(code);
    }
    return;
  }
  switch (dtype) {
    case DType::F32: case DType::C64: return store<float>(data, i, number);
    case DType::F64: case DType::C128: return store<double>(data, i, number);
    case DType::I8: return store<int8_t>(data, i, number);
    case DType::I16: return store<int16_t>(data, i, number);
    case DType::I32: return store<int32_t>(data, i, number);
    case DType::I64: return store<int64_t>(data, i, number);
    case DType::U16: return store<uint16_t>(data, i, number);
    case DType::U32: return store<uint32_t>(data, i, number);
    case DType::U64: return store<uint64_t>(data, i, number);
    default: return store<uint8_t>(data, i, number);
  }
}

inline bool is_float(DType dtype) {
  return format_of(dtype) != nullptr || dtype == DType::F32 || dtype == DType::F64 || numbers_in(dtype) == 2;
}

// Deterministic numbers, exact in double even as sums and products of a few.
inline double sample(DType dtype, int rank, size_t i, uint64_t seed) {
  const uint64_t mixed = (i + seed * 1315423911u + static_cast<uint64_t>(rank) * 2654435761u) * 0x9e3779b97f4a7c15u >> 40;
  if (dtype == DType::Bool) return static_cast<double>(mixed % 2);
  if (dtype == DType::Byte) return static_cast<double>(mixed % 256);
  if (is_float(dtype)) return (static_cast<double>(mixed % 9) - 4.0) / 2;
  const bool is_signed = dtype == DType::I8 || dtype == DType::I16 || dtype == DType::I32 || dtype == DType::I64;
  return static_cast<double>(mixed % 7) - (is_signed ? 3.0 : 0.0);
}

// Elements [first, first + count) of a rank's array.
inline void fill(DType dtype, void* data, size_t count, int rank, uint64_t seed, size_t first = 0) {
  const size_t numbers = numbers_in(dtype);
  for (size_t i = 0; i < count * numbers; ++i) put(dtype, data, i, sample(dtype, rank, first * numbers + i, seed));
}

inline double combine(DType dtype, Reduction reduction, double a, double b) {
  const bool truth = dtype == DType::Bool;
  switch (reduction) {
    case Reduction::Product: return a * b;
    case Reduction::Min: return std::min(a, b);
    case Reduction::Max: return std::max(a, b);
    case Reduction::BitAnd: return static_cast<double>(static_cast<int64_t>(a) & static_cast<int64_t>(b));
    case Reduction::BitOr: return static_cast<double>(static_cast<int64_t>(a) | static_cast<int64_t>(b));
    case Reduction::BitXor: return static_cast<double>(static_cast<int64_t>(a) ^ static_cast<int64_t>(b));
    default: return truth ? std::max(a, b) : a + b;
  }
}

inline double factor_of(int rank) { return 0.5 + rank; }

// `inputs[r]` is the array of rank r.
inline void reduce(DType dtype, Reduction reduction, const std::vector<const void*>& inputs, void* out, size_t count) {
  const size_t numbers = numbers_in(dtype);
  const bool pairs = numbers == 2 && reduction == Reduction::Product;
  for (size_t i = 0; i < count * numbers; i += pairs ? 2 : 1) {
    double value = 0;
    double imaginary = 0;
    for (size_t r = 0; r < inputs.size(); ++r) {
      double next = get(dtype, inputs[r], i);
      const double next_imaginary = pairs ? get(dtype, inputs[r], i + 1) : 0;
      if (reduction == Reduction::PremulSum) next *= factor_of(static_cast<int>(r));
      if (r == 0) {
        value = next;
        imaginary = next_imaginary;
      } else if (pairs) {
        const double real = value * next - imaginary * next_imaginary;
        imaginary = value * next_imaginary + imaginary * next;
        value = real;
      } else {
        value = combine(dtype, reduction, value, next);
      }
    }
    if (reduction == Reduction::Average) {
      const double divisor = static_cast<double>(inputs.size());
      if (dtype == DType::F64 || dtype == DType::C128) {
        value /= divisor;
      } else if (is_float(dtype)) {
        value = static_cast<float>(value) / static_cast<float>(divisor);
      } else {
        value = std::trunc(value / divisor);
      }
    }
    put(dtype, out, i, value);
    if (pairs) put(dtype, out, i + 1, imaginary);
  }
}

}  // namespace reference
