// Access to memory that other processes read while we write. Little-endian processors only, like the layout itself.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The black box is little-endian, and this processor is not."
#endif

namespace commlens {

inline uint64_t* word_at(char* base, uint64_t offset) { return reinterpret_cast<uint64_t*>(base + offset); }

// A reader that sees the value also sees all earlier stores, on ARM, too.
inline void publish(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

inline uint64_t observe(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// Store bytes into shared memory, by aligned words where possible, so that no reader sees half a word.
inline void store_bytes(char* to, const void* from, uint64_t size) {
  auto* source = static_cast<const char*>(from);
  uint64_t at = 0;
  for (; at + 8 <= size; at += 8) {
    uint64_t word;
    std::memcpy(&word, source + at, 8);
    __atomic_store_n(reinterpret_cast<uint64_t*>(to + at), word, __ATOMIC_RELAXED);
  }
  for (; at < size; ++at) __atomic_store_n(to + at, source[at], __ATOMIC_RELAXED);
}

inline void store_u32(char* to, uint32_t value, int order) { __atomic_store_n(reinterpret_cast<uint32_t*>(to), value, order); }

// Store the maximum of the present value and this one, for words that several threads raise.
inline void store_max(uint64_t* word, uint64_t value) {
  uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

}  // namespace commlens
