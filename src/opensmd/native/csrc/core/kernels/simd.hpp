// One body of code compiled for several instruction sets: simd<Body, vectors, Arguments...>(level) is a plain function
// that inlines Body::run under that level's target attribute. There is no -march flag, because machines share home
// folders.
#pragma once

#include "core/kernels/simd_level.hpp"

#define OPENSMD_INLINE inline __attribute__((always_inline))

namespace opensmd {

template <class Body, class... Arguments>
void run_generic(Arguments... arguments) {
  Body::run(arguments...);
}

#if defined(__x86_64__)
template <class Body, class... Arguments>
__attribute__((target("avx2,f16c"))) void run_avx2(Arguments... arguments) {
  Body::run(arguments...);
}

template <class Body, class... Arguments>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512"))) void run_avx512(
    Arguments... arguments) {
  Body::run(arguments...);
}

template <class Body, class... Arguments>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=256"))) void run_avx512_halves(
    Arguments... arguments) {
  Body::run(arguments...);
}
#endif

// AVX-512 in whole vectors or in half-width ones, which are faster for bodies that mostly load and store.
enum class Vectors { Whole, Halves };

template <class Body, Vectors vectors, class... Arguments>
constexpr auto simd(SimdLevel level) -> void (*)(Arguments...) {
#if defined(__x86_64__)
  if (level == SimdLevel::Avx512) {
    if constexpr (vectors == Vectors::Whole) {
      return &run_avx512<Body, Arguments...>;
    } else {
      return &run_avx512_halves<Body, Arguments...>;
    }
  }
  if (level == SimdLevel::Avx2) return &run_avx2<Body, Arguments...>;
#endif
  (void)level;
  return &run_generic<Body, Arguments...>;
}

}  // namespace opensmd
