#include "core/kernels/types.hpp"

namespace opensmd {

bool may_become(DType sent, DType received) {
  const auto bytes = [](DType dtype) { return dtype == DType::Byte || dtype == DType::U8; };
  return sent == received || bytes(sent) || bytes(received);
}

size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::C128: return 16;
    case DType::F64: case DType::I64: case DType::U64: case DType::C64: return 8;
    case DType::F32: case DType::I32: case DType::U32: return 4;
    case DType::F16: case DType::BF16: case DType::I16: case DType::U16: return 2;
    default: return 1;
  }
}

const char* name_of(DType dtype) {
  static const char* const names[] = {
      "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
      "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
      "float8_e5m2fnuz", "bytes"};
  return static_cast<size_t>(dtype) < sizeof(names) / sizeof(*names) ? names[static_cast<size_t>(dtype)] : "unknown";
}

const char* name_of(Reduction reduction) {
  static const char* const names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return static_cast<size_t>(reduction) < sizeof(names) / sizeof(*names) ? names[static_cast<size_t>(reduction)]
                                                                         : "unknown";
}

const char* name_of(Operation operation) {
  static const char* const names[] = {"nothing", "barrier", "all_reduce", "reduce", "broadcast", "all_gather",
                                      "gather", "scatter", "reduce_scatter", "all_to_all", "send", "recv"};
  return static_cast<size_t>(operation) < sizeof(names) / sizeof(*names) ? names[static_cast<size_t>(operation)]
                                                                         : "unknown";
}

namespace {

enum class Family { Float, Integer, Bool, Complex, Opaque };

Family family_of(DType dtype) {
  switch (dtype) {
    case DType::Bool: return Family::Bool;
    case DType::C64: case DType::C128: return Family::Complex;
    case DType::Byte: return Family::Opaque;
    case DType::I8: case DType::I16: case DType::I32: case DType::I64:
    case DType::U8: case DType::U16: case DType::U32: case DType::U64: return Family::Integer;
    default: return Family::Float;
  }
}

}  // namespace

bool reducible(DType dtype, Reduction reduction) {
  const bool bitwise =
      reduction == Reduction::BitAnd || reduction == Reduction::BitOr || reduction == Reduction::BitXor;
  switch (family_of(dtype)) {
    case Family::Float: return !bitwise;
    case Family::Integer: return reduction != Reduction::PremulSum;
    case Family::Bool: return reduction != Reduction::PremulSum && reduction != Reduction::Average;
    case Family::Complex: return !bitwise && reduction != Reduction::Min && reduction != Reduction::Max;
    case Family::Opaque: return bitwise;
  }
  return false;
}

}  // namespace opensmd
