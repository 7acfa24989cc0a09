// How the numbers of an all_reduce travel between hosts: as they are, or float32 in fewer bytes. What that loses may be
// kept, for the next call to add (error feedback): the sums of many calls are then right, if not each one.
#pragma once

#include <cstddef>
#include <optional>

#include "core/kernels/compression.hpp"

namespace opensmd::levels {

class Coding {
 public:
  Coding() = default;  // as they are

  // `residual`: null, or as many numbers as `data`. What `data` loses is written there, divided by `factor`, with which
  // the members' numbers are multiplied before they are added up.
  Coding(Compression compression, const float* data, float* residual, double factor)
      : compressor_(compression), data_(data), residual_(residual), scale_(static_cast<float>(1.0 / factor)) {}

  bool none() const { return !compressor_; }
  // What so many bytes of numbers become.
  size_t bytes(size_t plain) const;

  // `numbers` lie in `data`.
  void encode(void* code, const void* numbers, size_t plain) const;
  // Likewise; the numbers become what others will decode.
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
