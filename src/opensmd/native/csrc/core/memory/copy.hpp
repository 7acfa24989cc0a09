// Copies between private and shared memory.
//
// Not memcpy: from 2 KiB on, glibc uses "rep movsb", which on lines just written by another core is three to five times
// slower here than plain vector loads and stores.
#pragma once

#include <cstddef>

namespace opensmd {

using Copy = void (*)(void* to, const void* from, size_t bytes);

void copy_bytes(void* to, const void* from, size_t bytes);

// From afar, that is, from memory or another core's cache: several pages side by side, because the lines of one page
// alone do not saturate the path there.
void copy_from_afar(void* to, const void* from, size_t bytes);

// From memory into shared memory: one line after another, while lines of the next eight pages are fetched side by side.
void copy_from_memory(void* to, const void* from, size_t bytes);

// Out of shared memory close behind its writer: two pages side by side, with no prefetching of lines that the writer
// may be working on. Only for results that stay in the caches.
void copy_behind_writer(void* to, const void* from, size_t bytes);

// Bypasses the caches on writing, for results much larger than the caches: saves reading what is overwritten.
void copy_past_cache(void* to, const void* from, size_t bytes);
void copy_from_afar_past_cache(void* to, const void* from, size_t bytes);

// From the first size on, a result counts as much larger than the caches; up to the second, as staying in them.
constexpr size_t kPastCacheBytes = size_t{24} << 20;
constexpr size_t kInCacheBytes = size_t{4} << 20;

}  // namespace opensmd
