#include "copy.hpp"

#include <cstdint>
#include <cstring>

#include "kernels.hpp"

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#define OPENSMD_VECTOR_COPY 1
#endif

namespace opensmd {

namespace {

void copy_plain(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }

#if OPENSMD_VECTOR_COPY

// Two lines; the loads are done before the stores.
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

// The rest after the last whole lines goes to memcpy.
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

// Found by trying: four pages beat one, two and eight; the lines wanted next are those of the next four pages.
constexpr size_t kPagesAtOnce = 4;
constexpr size_t kAheadBytes = kPagesAtOnce * 4096;

// Returns how many bytes it has moved: all but the last pages.
template <void (*two_lines)(char*, const char*)>
__attribute__((target("avx2"), always_inline)) inline size_t side_by_side_avx2(char* out, const char* in,
                                                                               size_t bytes) {
  size_t block = 0;
  for (; block + kAheadBytes <= bytes; block += kAheadBytes) {
    for (size_t line = block; line < block + 4096; line += 128) {
      for (size_t i = line; i < block + kAheadBytes; i += 4096) {
        _mm_prefetch(in + i + kAheadBytes, _MM_HINT_T1);
        _mm_prefetch(in + i + kAheadBytes + 64, _MM_HINT_T1);
        two_lines(out + i, in + i);
      }
    }
  }
  return block;
}

__attribute__((target("avx2"))) void gather_avx2(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t done = side_by_side_avx2<copy_lines_avx2>(out, in, bytes);
  copy_bytes(out + done, in + done, bytes - done);
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
  if (from_afar) i += side_by_side_avx2<stream_lines_avx2>(out + head, in + head, bytes - head);
  for (; i + 128 <= bytes; i += 128) stream_lines_avx2(out + i, in + i);
  _mm_sfence();
  std::memcpy(out + i, in + i, bytes - i);
}

#endif

using Copy = void (*)(void*, const void*, size_t);

Copy best_copy() {
#if OPENSMD_VECTOR_COPY
  if (best_simd_level() == SimdLevel::Avx512) return copy_avx512;
  if (best_simd_level() == SimdLevel::Avx2) return copy_avx2;
#endif
  return copy_plain;
}

template <bool from_afar>
Copy best_stream() {
#if OPENSMD_VECTOR_COPY
  if (best_simd_level() != SimdLevel::Generic) return stream_avx2<from_afar>;
#endif
  return copy_plain;
}

Copy best_gather() {
#if OPENSMD_VECTOR_COPY
  if (best_simd_level() != SimdLevel::Generic) return gather_avx2;
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
  static const Copy stream = best_stream<false>();
  stream(to, from, bytes);
}

void copy_from_afar_past_cache(void* to, const void* from, size_t bytes) {
  static const Copy stream = best_stream<true>();
  stream(to, from, bytes);
}

void copy_from_afar(void* to, const void* from, size_t bytes) {
  static const Copy gather = best_gather();
  gather(to, from, bytes);
}

}  // namespace opensmd
