// How the numbers of an all_reduce travel between hosts: as they are, or, if float32, in fewer bytes. What coding loses
// may be kept for the next call to add (error feedback): the sum of many calls is then right, if not each single one.
#pragma once

#include <cstddef>
#include <optional>

#include "core/kernels/compression.hpp"

namespace opensmd::levels {

class Coding {
 public:
  Coding() = default;  // as they are

  // `residual`: null, or as many numbers as `data`. What coding `data` loses is written there, divided by `factor`, by
  // which members' numbers are multiplied before they are added up.
  Coding(Compression compression, const float* data, float* residual, double factor)
      : compressor_(compression), data_(data), residual_(residual), scale_(static_cast<float>(1.0 / factor)) {}

  bool none() const { return !compressor_; }
  // The coded size of this many bytes of numbers.
  size_t bytes(size_t plain) const;

  // `numbers` lie in `data`.
  void encode(void* code, const void* numbers, size_t plain) const;
  // Likewise; `numbers` become what others will decode.
  void encode_and_round(void* code, void* numbers, size_t plain) const;
  void decode(void* numbers, const void* code, size_t plain) const;

 private:
  template <bool rounds>
  void encode_runs(void* code, float* numbers, size_t count) const;

  std::optional<Compressor> compressor_;
  const float* data_ = nullptr;
  float* residual_ = nullptr;
  float scale_ = 1;
};

}  // namespace opensmd::levels
