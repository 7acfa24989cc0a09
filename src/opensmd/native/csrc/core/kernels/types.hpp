// The vocabulary of every call: element types, reductions and operations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace opensmd {

enum class DType : uint8_t {
  F32, F64, F16, BF16,
  I8, I16, I32, I64,
  U8, U16, U32, U64,
  Bool, C64, C128,
  F8E4M3FN, F8E5M2, F8E4M3FNUZ, F8E5M2FNUZ,
  Byte,  // opaque bytes for dtypes without arithmetic here; only moved (except for bitwise reductions)
};

// Averages of integers are computed in 64 bits and truncate toward zero. Min and Max propagate NaN, as in torch. Bool:
// Sum is "or", Product is "and". PremulSum takes one factor per member (floating point and complex only). f16, bf16 and
// f8 accumulate in f32 and round once.
enum class Reduction : uint8_t { Sum, Average, Product, Min, Max, BitAnd, BitOr, BitXor, PremulSum };

enum class Operation : uint8_t {
  None, Barrier, AllReduce, Reduce, Broadcast, AllGather, Gather, Scatter, ReduceScatter, AllToAll, Send, Receive,
};

// Whether a message sent as one may be received as the other: bytes may come from anything and become anything.
bool may_become(DType sent, DType received);

size_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(Reduction reduction);
const char* name_of(Operation operation);

// Whether a reduction makes sense for a dtype here; if not, calls throw std::invalid_argument.
bool reducible(DType dtype, Reduction reduction);

}  // namespace opensmd
