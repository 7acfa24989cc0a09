// Copies between private and shared memory.
//
// Not memcpy: glibc takes "rep movsb" for 2 KiB and more, which on lines that another core has just written is three
// to five times slower here than plain vector loads and stores.
#pragma once

#include <cstddef>

namespace opensmd {

using Copy = void (*)(void* to, const void* from, size_t bytes);

void copy_bytes(void* to, const void* from, size_t bytes);

// From afar, which is memory or the other core's cache: several pages side by side, because the lines of one page alone
// do not keep the way there busy.
void copy_from_afar(void* to, const void* from, size_t bytes);

// From memory, for writing into shared memory: one line after the other, while those of the next eight pages are fetched
// side by side.
void copy_from_memory(void* to, const void* from, size_t bytes);

// Out of shared memory close behind its writer: two pages side by side, and nothing fetched ahead that the writer may be
// at work on. Only for results that stay in the caches.
void copy_behind_writer(void* to, const void* from, size_t bytes);

// Around the caches on the way out, for results much larger than the caches: saves reading what is overwritten.
void copy_past_cache(void* to, const void* from, size_t bytes);
void copy_from_afar_past_cache(void* to, const void* from, size_t bytes);

// From where on a result is taken for much larger than the caches, and up to where it is taken to stay in them.
constexpr size_t kPastCacheBytes = size_t{24} << 20;
constexpr size_t kInCacheBytes = size_t{4} << 20;

}  // namespace opensmd
