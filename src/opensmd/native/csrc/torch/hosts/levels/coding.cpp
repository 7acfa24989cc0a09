#include "torch/hosts/levels/coding.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace opensmd::levels {
namespace {

// How many numbers are coded and decoded again while they are in the first-level cache. Whole blocks of int8.
constexpr size_t kRun = 8 * kCompressionBlock;

}  // namespace

size_t Coding::bytes(size_t plain) const { return none() ? plain : compressor_->bytes(plain / sizeof(float)); }

template <bool rounds>
void Coding::encode_runs(void* code, float* numbers, size_t count) const {
  auto* to = static_cast<char*>(code);
  if (!rounds && residual_ == nullptr) return compressor_->compress(to, numbers, count);
  float decoded[kRun];
  for (size_t begin = 0; begin < count; begin += kRun) {
    const size_t length = std::min(kRun, count - begin);
    float* run = numbers + begin;
    compressor_->compress(to, run, length);
    compressor_->expand(decoded, to, length);
    if (residual_ != nullptr) {
      float* lost = residual_ + (run - data_);
      // No later call could make good an infinite or NaN loss.
      for (size_t i = 0; i < length; ++i) {
        const float difference = (run[i] - decoded[i]) * scale_;
        lost[i] = std::isfinite(difference) ? difference : 0.0f;
      }
    }
    if (rounds) std::memcpy(run, decoded, length * sizeof(float));
    to += compressor_->bytes(length);
  }
}

void Coding::encode(void* code, const void* numbers, size_t plain) const {
  // The numbers are only read.
  encode_runs<false>(code, static_cast<float*>(const_cast<void*>(numbers)), plain / sizeof(float));
}

void Coding::encode_and_round(void* code, void* numbers, size_t plain) const {
  encode_runs<true>(code, static_cast<float*>(numbers), plain / sizeof(float));
}

void Coding::decode(void* numbers, const void* code, size_t plain) const {
  compressor_->expand(static_cast<float*>(numbers), code, plain / sizeof(float));
}

}  // namespace opensmd::levels
