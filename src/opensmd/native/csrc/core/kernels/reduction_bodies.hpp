// The loops of reductions, one body for each way of computing; kernels.cpp chooses among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/kernels/elements.hpp"
#include "core/kernels/kernels.hpp"
#include "core/kernels/narrow_floats.hpp"
#include "core/kernels/simd.hpp"
#include "core/memory/copy.hpp"

namespace opensmd::reduction {

// Work is done in blocks that stay in the first-level cache between an element's inputs and outputs.
constexpr size_t kBlockBytes = 8192;
constexpr size_t kLineBytes = 64;

OPENSMD_INLINE bool begins_line(const void* at) { return reinterpret_cast<uintptr_t>(at) % kLineBytes == 0; }

#if defined(__x86_64__)
OPENSMD_INLINE void prefetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }
OPENSMD_INLINE void stream_fence() { _mm_sfence(); }
OPENSMD_INLINE void stream_line(void* to, const void* from) {
  for (size_t i = 0; i < kLineBytes / sizeof(__m128i); ++i) {
    _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
  }
}
#else
OPENSMD_INLINE void prefetch(const void*) {}
OPENSMD_INLINE void stream_fence() {}
OPENSMD_INLINE void stream_line(void* to, const void* from) { std::memcpy(to, from, kLineBytes); }
#endif

template <class T>
OPENSMD_INLINE const T* input(const ReduceJob& job, int i, size_t at) {
  return static_cast<const T*>(job.inputs[i]) + at;
}

template <class T>
OPENSMD_INLINE T* output(const ReduceJob& job, int i, size_t at) {
  return static_cast<T*>(job.outputs[i]) + at;
}

template <class T>
OPENSMD_INLINE void copy_to_others(const ReduceJob& job, size_t at, size_t count) {
  const T* first = output<T>(job, 0, at);
  for (int i = 1; i < job.output_count; ++i) copy_bytes(output<T>(job, i, at), first, count * sizeof(T));
}

// `out` may be `a` or `b`, but never overlaps them with a shift: ivdep promises the compiler that.
template <class Op, class T>
OPENSMD_INLINE void combine(T* out, const T* a, const T* b, size_t count) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) out[i] = Op::apply(a[i], b[i]);
}

// A job's whole lines, in the direction of its walk.
template <class T>
struct Lines {
  static constexpr size_t kLength = kLineBytes / sizeof(T);  // in elements

  OPENSMD_INLINE explicit Lines(const ReduceJob& job)
      : count(job.count / kLength), first(job.walk == Walk::Backwards ? (count - 1) * kLength : 0),
        step(job.walk == Walk::Backwards ? -kLength : kLength) {}

  size_t count, first, step;
};

// Each line goes from all inputs to all outputs at once; each output may be one of the inputs. Two inputs have two
// outputs.
template <class Op, class T, int kInputs>
OPENSMD_INLINE void combine_all(const ReduceJob& job) {
  constexpr size_t kLine = Lines<T>::kLength;
  const Lines<T> lines(job);
  const T* in[kInputs];
  T* out[kInputs];
  for (int k = 0; k < kInputs; ++k) in[k] = input<T>(job, k, 0);
  const int outputs = kInputs == 2 ? 2 : job.output_count;
  for (int k = 0; k < outputs; ++k) out[k] = output<T>(job, k, 0);
  const auto combined = [&in](size_t at) {
    T result = Op::apply(in[0][at], in[1][at]);
    if constexpr (kInputs > 2) result = Op::apply(result, in[2][at]);
    if constexpr (kInputs > 3) result = Op::apply(result, in[3][at]);
    return result;
  };
  size_t at = lines.first;
#pragma GCC unroll 4
  for (size_t n = 0; n < lines.count; ++n, at += lines.step) {
    T results[kLine];
    for (size_t j = 0; j < kLine; ++j) results[j] = combined(at + j);
    for (int k = 0; k < outputs; ++k) {
      for (size_t j = 0; j < kLine; ++j) out[k][at + j] = results[j];
    }
  }
  for (size_t i = lines.count * kLine; i < job.count; ++i) {
    const T result = combined(i);
    for (int k = 0; k < outputs; ++k) out[k][i] = result;
  }
}

// Likewise for more inputs, up to as many as a first-level cache has places for, where all lie alike in their
// pages.
constexpr int kMostTogether = 8;
template <class Op, class T>
OPENSMD_INLINE void combine_many(const ReduceJob& job) {
  constexpr size_t kLine = Lines<T>::kLength;
  const Lines<T> lines(job);
  const T* in[kMostTogether];
  T* out[kMostTogether];
  const int inputs = job.input_count, outputs = job.output_count;
  for (int k = 0; k < inputs; ++k) in[k] = input<T>(job, k, 0);
  for (int k = 0; k < outputs; ++k) out[k] = output<T>(job, k, 0);
  const auto combine_line = [&](size_t at, size_t count) __attribute__((always_inline)) {
    T results[kLine];
    for (size_t j = 0; j < count; ++j) results[j] = Op::apply(in[0][at + j], in[1][at + j]);
    for (int k = 2; k < inputs; ++k) {
      for (size_t j = 0; j < count; ++j) results[j] = Op::apply(results[j], in[k][at + j]);
    }
    for (int k = 0; k < outputs; ++k) {
      for (size_t j = 0; j < count; ++j) out[k][at + j] = results[j];
    }
  };
  size_t at = lines.first;
  for (size_t n = 0; n < lines.count; ++n, at += lines.step) combine_line(at, kLine);
  combine_line(lines.count * kLine, job.count - lines.count * kLine);
}

// Bypasses the caches, working on four pages side by side like copies from afar (see copy.hpp); the output begins a
// line.
template <class Op, class T>
OPENSMD_INLINE void combine_past_cache(const ReduceJob& job) {
  T* out = output<T>(job, 0, 0);
  const T* a = input<T>(job, 0, 0);
  const T* b = input<T>(job, 1, 0);
  constexpr size_t kLine = kLineBytes / sizeof(T), kPage = 4096 / sizeof(T), kBlock = 4 * kPage;
  size_t block = 0;
  for (; block + kBlock <= job.count; block += kBlock) {
    for (size_t line = block; line < block + kPage; line += kLine) {
      for (size_t i = line; i < block + kBlock; i += kPage) {
        prefetch(a + i + kBlock);
        prefetch(b + i + kBlock);
        alignas(kLineBytes) T results[kLine];
        for (size_t j = 0; j < kLine; ++j) results[j] = Op::apply(a[i + j], b[i + j]);
        stream_line(out + i, results);
      }
    }
  }
  stream_fence();
  combine<Op>(out + block, a + block, b + block, job.count - block);
}

// Types that are added, multiplied or compared directly.
template <class T, class Op>
struct Direct {
  // Frequent jobs, each in one pass; false if the job is none of them. Every kernel takes time to compile, so only sums
  // have those for more than two inputs and for large tensors.
  static OPENSMD_INLINE bool run_frequent(const ReduceJob& job) {
    const int inputs = job.input_count, outputs = job.output_count;
    if (job.divisor != 1.0 || outputs > inputs) return false;
    if constexpr (std::is_same_v<Op, elements::Add>) {
      if (job.walk == Walk::PastCache && inputs == 2 && outputs == 1 && begins_line(job.outputs[0])) {
        combine_past_cache<Op, T>(job);
        return true;
      }
      if (inputs == 3) combine_all<Op, T, 3>(job);
      if (inputs == 4) combine_all<Op, T, 4>(job);
      if (inputs > 4 && inputs <= kMostTogether) combine_many<Op, T>(job);
      if (inputs >= 3 && inputs <= kMostTogether) return true;
    }
    if (inputs != 2 || outputs != 2) return false;
    combine_all<Op, T, 2>(job);
    return true;
  }

  static OPENSMD_INLINE void run(const ReduceJob& job) {
    if (run_frequent(job)) return;
    constexpr size_t kBlock = kBlockBytes / sizeof(T);
    alignas(64) T partial[kBlock];
    const int last = job.input_count - 1;
    for (size_t at = 0; at < job.count; at += kBlock) {
      const size_t count = std::min(kBlock, job.count - at);
      T* out = output<T>(job, 0, at);
      if (last == 0) {
        std::memmove(out, input<T>(job, 0, at), count * sizeof(T));
      } else if (last == 1) {
        combine<Op>(out, input<T>(job, 0, at), input<T>(job, 1, at), count);
      } else {
        combine<Op>(partial, input<T>(job, 0, at), input<T>(job, 1, at), count);
        for (int k = 2; k < last; ++k) combine<Op>(partial, partial, input<T>(job, k, at), count);
        combine<Op>(out, partial, input<T>(job, last, at), count);
      }
      if constexpr (std::is_floating_point_v<T>) {
        if (job.divisor != 1.0) {
          const T divisor = static_cast<T>(job.divisor);
          for (size_t i = 0; i < count; ++i) out[i] /= divisor;
        }
      }
      copy_to_others<T>(job, at, count);
    }
  }
};

// f32 and f64 with one factor per input.
template <class T>
struct Premultiplied {
  static OPENSMD_INLINE void run(const ReduceJob& job) {
    constexpr size_t kBlock = kBlockBytes / sizeof(T);
    alignas(64) T partial[kBlock];
    for (size_t at = 0; at < job.count; at += kBlock) {
      const size_t count = std::min(kBlock, job.count - at);
      for (int k = 0; k < job.input_count; ++k) {
        const T* in = input<T>(job, k, at);
        const T factor = static_cast<T>(job.factors[k]);
        if (k == 0) {
          for (size_t i = 0; i < count; ++i) partial[i] = in[i] * factor;
        } else {
          for (size_t i = 0; i < count; ++i) partial[i] += in[i] * factor;
        }
      }
      std::memcpy(output<T>(job, 0, at), partial, count * sizeof(T));
      copy_to_others<T>(job, at, count);
    }
  }
};

// Integers: summed in 64 bits, so that narrow types do not overflow, and divided toward zero.
template <class T>
struct Averaged {
  static OPENSMD_INLINE void run(const ReduceJob& job) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    constexpr size_t kBlock = kBlockBytes / sizeof(Wide);
    alignas(64) uint64_t partial[kBlock];
    const Wide divisor = static_cast<Wide>(job.divisor);
    for (size_t at = 0; at < job.count; at += kBlock) {
      const size_t count = std::min(kBlock, job.count - at);
      for (size_t i = 0; i < count; ++i) partial[i] = 0;
      for (int k = 0; k < job.input_count; ++k) {
        const T* in = input<T>(job, k, at);
        for (size_t i = 0; i < count; ++i) partial[i] += static_cast<uint64_t>(static_cast<Wide>(in[i]));
      }
      T* out = output<T>(job, 0, at);
      for (size_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<Wide>(partial[i]) / divisor);
      copy_to_others<T>(job, at, count);
    }
  }
};

// f16, bf16, f8: computed in f32, rounded once at the end.
template <class Op, bool premultiplied>
struct Narrow {
  static OPENSMD_INLINE void run(const ReduceJob& job) {
    constexpr size_t kBlock = kBlockBytes / sizeof(float) / 2;
    alignas(64) float partial[kBlock];
    alignas(64) float next[kBlock];
    for (size_t at = 0; at < job.count; at += kBlock) {
      const size_t count = std::min(kBlock, job.count - at);
      for (int k = 0; k < job.input_count; ++k) {
        float* wide = k == 0 ? partial : next;
        job.format->widen(wide, input<char>(job, k, at * job.width), count);
        if (premultiplied) {
          const float factor = static_cast<float>(job.factors[k]);
          for (size_t i = 0; i < count; ++i) wide[i] *= factor;
        }
        if (k > 0) combine<Op>(partial, partial, next, count);
      }
      if (job.divisor != 1.0) {
        const float divisor = static_cast<float>(job.divisor);
        for (size_t i = 0; i < count; ++i) partial[i] /= divisor;
      }
      job.format->narrow(output<char>(job, 0, at * job.width), partial, count);
      copy_to_others<char>(job, at * job.width, count * job.width);
    }
  }
};

}  // namespace opensmd::reduction
