// A table by sequences of words: what a stack, or what a collective asked for, is recognised by.
#pragma once

#include <cstdint>
#include <unordered_map>
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

}  // namespace commlens
