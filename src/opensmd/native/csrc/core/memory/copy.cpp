#include "core/memory/copy.hpp"

#include <cstdint>
#include <cstring>

#include "core/kernels/simd_level.hpp"

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#define OPENSMD_VECTOR_COPY 1
#endif

namespace opensmd {

namespace {

void copy_plain(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#if OPENSMD_VECTOR_COPY

// Two lines; all loads come before the stores.
__attribute__((target("avx2"), always_inline)) inline void copy_lines_avx2(char* out, const char* in) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 32));
  const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 64));
  const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 96));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), b);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64), c);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 96), d);
}

// The rest after the last whole lines is left to memcpy.
__attribute__((target("avx2"))) void copy_avx2(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  size_t i = 0;
  for (; i + 128 <= bytes; i += 128) copy_lines_avx2(out + i, in + i);
  std::memcpy(out + i, in + i, bytes - i);
}

__attribute__((target("avx512f"))) void copy_avx512(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  size_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    const __m512i a = _mm512_loadu_si512(in + i);
    const __m512i b = _mm512_loadu_si512(in + i + 64);
    const __m512i c = _mm512_loadu_si512(in + i + 128);
    const __m512i d = _mm512_loadu_si512(in + i + 192);
    _mm512_storeu_si512(out + i, a);
    _mm512_storeu_si512(out + i + 64, b);
    _mm512_storeu_si512(out + i + 128, c);
    _mm512_storeu_si512(out + i + 192, d);
  }
  std::memcpy(out + i, in + i, bytes - i);
}

__attribute__((target("avx2"), always_inline)) inline void stream_lines_avx2(char* out, const char* in) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 32));
  const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 64));
  const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + 96));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out), a);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out + 32), b);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out + 64), c);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out + 96), d);
}

enum class Ahead { Fetch, Nothing };

// Copies `pages` side by side while prefetching as many pages after them. Returns how many bytes it has copied: all but
// the last pages.
template <void (*two_lines)(char*, const char*), size_t pages, Ahead ahead>
__attribute__((target("avx2"), always_inline)) inline size_t side_by_side_avx2(char* out, const char* in,
                                                                               size_t bytes) {
  constexpr size_t together = pages * 4096;
  size_t block = 0;
  for (; block + together <= bytes; block += together) {
    for (size_t line = block; line < block + 4096; line += 128) {
      for (size_t i = line; i < block + together; i += 4096) {
        if constexpr (ahead == Ahead::Fetch) {
          _mm_prefetch(in + i + together, _MM_HINT_T1);
          _mm_prefetch(in + i + together + 64, _MM_HINT_T1);
        }
        two_lines(out + i, in + i);
      }
    }
  }
  return block;
}

template <size_t pages, Ahead ahead>
__attribute__((target("avx2"))) void pages_avx2(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t done = side_by_side_avx2<copy_lines_avx2, pages, ahead>(out, in, bytes);
  copy_bytes(out + done, in + done, bytes - done);
}

// Found by experiment, like all of these: from afar, four pages beat one, two and eight.
constexpr Copy gather_avx2 = pages_avx2<4, Ahead::Fetch>;
constexpr Copy follow_avx2 = pages_avx2<2, Ahead::Nothing>;

// More than four pages can be fetched side by side, but not written: a first-level cache has too few places for the
// same line of so many.
__attribute__((target("avx2"))) void from_memory_avx2(void* to, const void* from, size_t bytes) {
  constexpr size_t pages = 8, together = pages * 4096, four_lines = 256;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  size_t block = 0;
  for (; block + together <= bytes; block += together) {
    const char* const next = in + block + together;
    for (size_t turn = 0; turn < together / four_lines; ++turn) {
      const char* const fetched = next + turn % pages * 4096 + turn / pages * four_lines;
      for (size_t line = 0; line < four_lines; line += 64) _mm_prefetch(fetched + line, _MM_HINT_T1);
      const size_t i = block + turn * four_lines;
      copy_lines_avx2(out + i, in + i);
      copy_lines_avx2(out + i + 128, in + i + 128);
    }
  }
  copy_bytes(out + block, in + block, bytes - block);
}

template <bool from_afar>
__attribute__((target("avx2"))) void stream_avx2(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  // Streaming stores want aligned addresses, and whole lines to be worth it.
  const size_t head = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64;
  if (bytes < 256 + head) return copy_avx2(to, from, bytes);
  std::memcpy(out, in, head);
  size_t i = head;
  if (from_afar) i += side_by_side_avx2<stream_lines_avx2, 4, Ahead::Fetch>(out + head, in + head, bytes - head);
  for (; i + 128 <= bytes; i += 128) stream_lines_avx2(out + i, in + i);
  _mm_sfence();
  std::memcpy(out + i, in + i, bytes - i);
}

#define OPENSMD_AVX2_OR_PLAIN(copy) (best_simd_level() != SimdLevel::Generic ? (copy) : copy_plain)
#else
#define OPENSMD_AVX2_OR_PLAIN(copy) copy_plain
#endif

Copy best_copy() {
#if OPENSMD_VECTOR_COPY
  if (best_simd_level() == SimdLevel::Avx512) return copy_avx512;
  if (best_simd_level() == SimdLevel::Avx2) return copy_avx2;
#endif
  return copy_plain;
}

}  // namespace

void copy_bytes(void* to, const void* from, size_t bytes) {
  static const Copy copy = best_copy();
  if (bytes < 512) {
    std::memcpy(to, from, bytes);
  } else {
    copy(to, from, bytes);
  }
}

void copy_past_cache(void* to, const void* from, size_t bytes) {
  static const Copy copy = OPENSMD_AVX2_OR_PLAIN(stream_avx2<false>);
  copy(to, from, bytes);
}

void copy_from_afar_past_cache(void* to, const void* from, size_t bytes) {
  static const Copy copy = OPENSMD_AVX2_OR_PLAIN(stream_avx2<true>);
  copy(to, from, bytes);
}

void copy_from_afar(void* to, const void* from, size_t bytes) {
  static const Copy copy = OPENSMD_AVX2_OR_PLAIN(gather_avx2);
  copy(to, from, bytes);
}

void copy_from_memory(void* to, const void* from, size_t bytes) {
  static const Copy copy = OPENSMD_AVX2_OR_PLAIN(from_memory_avx2);
  copy(to, from, bytes);
}

void copy_behind_writer(void* to, const void* from, size_t bytes) {
  static const Copy copy = OPENSMD_AVX2_OR_PLAIN(follow_avx2);
  copy(to, from, bytes);
}

}  // namespace opensmd
