#include "core/kernels/simd_level.hpp"

namespace opensmd {

SimdLevel best_simd_level() {
#if defined(__x86_64__)
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return SimdLevel::Generic;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return wide ? SimdLevel::Avx512 : SimdLevel::Avx2;
  }();
  return level;
#else
  return SimdLevel::Generic;
#endif
}

}  // namespace opensmd
