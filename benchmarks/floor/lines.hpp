// Loops over floats, a cache line at a time: what the floor copies and sums with.
//
// Not memcpy: glibc takes "rep movsb" for all but the smallest, which is slow on lines that another core has just
// written. `work(at, unit)` is called for every line, and for what is left over float by float.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

namespace floor_ {

constexpr int64_t kLarge = (8 << 20) / 4;  // from so many floats on a tensor is taken for much larger than the caches

struct __attribute__((may_alias)) Line {
  using Vector = float __attribute__((vector_size(64), aligned(4)));
  Vector v;
  static constexpr int64_t floats = 16;
};
struct Single {
  float v;
  static constexpr int64_t floats = 1;
};

template <class Unit>
Unit& as(float* at) { return *reinterpret_cast<Unit*>(at); }
template <class Unit>
const Unit& as(const float* at) { return *reinterpret_cast<const Unit*>(at); }

template <class Work>
inline void each_line(int64_t count, const Work& work) {
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + Line::floats <= count; i += Line::floats) work(i, Line{});
  for (; i < count; i++) work(i, Single{});
}

template <class Work>
inline void each_line_backwards(int64_t count, const Work& work) {
  int64_t i = count;
  for (; i % Line::floats != 0; i--) work(i - 1, Single{});
#pragma GCC unroll 4
  for (; i > 0; i -= Line::floats) work(i - Line::floats, Line{});
}

// Four pages side by side, the next four on their way from memory: the lines of one page alone do not keep it busy.
template <class Work>
inline void each_line_of_four_pages(int64_t count, const float* from_memory, const Work& work) {
  constexpr int64_t page = 4096 / 4, block = 4 * page, two = 2 * Line::floats;
  int64_t done = 0;
  for (; done + block <= count; done += block) {
    for (int64_t line = done; line < done + page; line += two) {
      for (int64_t i = line; i < done + block; i += page) {
        _mm_prefetch(from_memory + i + block, _MM_HINT_T1);
        _mm_prefetch(from_memory + i + block + Line::floats, _MM_HINT_T1);
        work(i, Line{});
        work(i + Line::floats, Line{});
      }
    }
  }
  each_line(count - done, [&](int64_t i, auto unit) { work(done + i, unit); });
}

inline void copy(float* to, const float* from, int64_t count) {
  each_line(count, [=](int64_t i, auto unit) {
    using Unit = decltype(unit);
    as<Unit>(to + i) = as<Unit>(from + i);
  });
}

inline void copy_from_memory(float* to, const float* from, int64_t count) {
  each_line_of_four_pages(count, from, [=](int64_t i, auto unit) {
    using Unit = decltype(unit);
    as<Unit>(to + i) = as<Unit>(from + i);
  });
}

// Around the caches on the way out. Whole lines want aligned addresses.
inline void put_past_cache(float* to, const Line& line) {
#ifdef __AVX512F__
  _mm512_stream_ps(to, reinterpret_cast<__m512>(line.v));
#else
  const float* from = reinterpret_cast<const float*>(&line);
  for (int i = 0; i < Line::floats; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
#endif
}
inline void put_past_cache(float* to, const Single& single) { *to = single.v; }
inline bool aligned(const float* at) { return reinterpret_cast<uintptr_t>(at) % 64 == 0; }

inline void copy_past_cache(float* to, const float* from, int64_t count) {
  if (!aligned(to)) return copy_from_memory(to, from, count);
  each_line_of_four_pages(count, from, [=](int64_t i, auto unit) {
    put_past_cache(to + i, as<decltype(unit)>(from + i));
  });
  _mm_sfence();
}

inline void add(float* out, const float* a, const float* b, int64_t count) {
  each_line(count, [=](int64_t i, auto unit) {
    using Unit = decltype(unit);
    as<Unit>(out + i).v = as<Unit>(a + i).v + as<Unit>(b + i).v;
  });
}

// `b` comes from memory.
inline void add_past_cache(float* out, const float* a, const float* b, int64_t count) {
  each_line_of_four_pages(count, b, [=](int64_t i, auto unit) {
    using Unit = decltype(unit);
    put_past_cache(out + i, Unit{as<Unit>(a + i).v + as<Unit>(b + i).v});
  });
  _mm_sfence();
}

}  // namespace floor_
