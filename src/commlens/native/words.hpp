// A table by sequences of words: what a stack, or what a collective asked for, is recognised by.
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

// Not locked: its owner is.
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

// No two ages in a process are the same.
inline uint64_t next_age() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

// What one thread found last, in front of a table that threads share. Everything is forgotten when the table's age changes.
template <class Value>
class Recent {
 public:
  // The value, or null.
  Value* find(uint64_t age, const Words& key, uint64_t hash) {
    Entry& entry = entries_[hash % SIZE];
    return entry.age == age && entry.hash == hash && entry.key == key ? &entry.value : nullptr;
  }

  void put(uint64_t age, const Words& key, uint64_t hash, Value value) { entries_[hash % SIZE] = {age, hash, key, std::move(value)}; }

 private:
  static constexpr size_t SIZE = 64;
  struct Entry {
    uint64_t age = 0, hash = 0;
    Words key;
    Value value{};
  };
  std::array<Entry, SIZE> entries_;
};

}  // namespace commlens
