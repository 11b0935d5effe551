// A table by sequences of words, which identify a stack or the arguments of a collective.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace commlens {

using Words = std::vector<uint64_t>;

inline uint64_t hash_of(const Words& words) {
  uint64_t hash = 0x9E3779B97F4A7C15u ^ words.size();
  for (uint64_t word : words) {
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  }
  return hash;
}

// Not thread-safe: the owner of a table locks it.
template <class Value>
class WordTable {
 public:
  // The value, or null.
  Value* find(const Words& key, uint64_t hash) {
    auto range = entries_.equal_range(hash);
    for (auto it = range.first; it != range.second; ++it)
      if (it->second.key == key) return &it->second.value;
    return nullptr;
  }

  Value* put(Words key, uint64_t hash, Value value) {
    return &entries_.emplace(hash, Entry{std::move(key), std::move(value)})->second.value;
  }

  size_t size() const { return entries_.size(); }
  void swap(WordTable& other) { entries_.swap(other.entries_); }

 private:
  struct Entry {
    Words key;
    Value value;
  };
  std::unordered_multimap<uint64_t, Entry> entries_;
};

// A number that no earlier call in this process has returned.
inline uint64_t next_generation() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// The entries that one thread found last, in front of a table that threads share. Valid only for the table's current generation.
template <class Value>
class ThreadCache {
 public:
  // The value, or null.
  Value* find(uint64_t generation, const Words& key, uint64_t hash) {
    Entry& entry = entries_[hash % SIZE];
    return entry.generation == generation && entry.hash == hash && entry.key == key ? &entry.value : nullptr;
  }

  void put(uint64_t generation, const Words& key, uint64_t hash, Value value) { entries_[hash % SIZE] = {generation, hash, key, std::move(value)}; }

 private:
  static constexpr size_t SIZE = 64;
  struct Entry {
    uint64_t generation = 0, hash = 0;
    Words key;
    Value value{};
  };
  std::array<Entry, SIZE> entries_;
};

}  // namespace commlens
