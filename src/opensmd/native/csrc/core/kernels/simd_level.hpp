// The instruction sets that code is compiled for; which one runs is decided at run time (see simd.hpp).
#pragma once

namespace opensmd {

enum class SimdLevel { Generic, Avx2, Avx512 };

SimdLevel best_simd_level();  // of this machine

}  // namespace opensmd
