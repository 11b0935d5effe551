// Collectives under way in this process, and what is known of their end. commlens/capture/recorder.py does the same in Python and
// says why. Everything here is under the recorder's mutex; what is dropped is handed out, to be destroyed after it.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "asked.hpp"

namespace commlens {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Token {
  uint64_t index = 0, offset = 0, since = 0, number = 0, tagged_number = 0, stack = 0;
  AskedPtr asked;
  uint32_t thread = 0;
  bool coalesced = false;
  std::atomic<bool> waiting{false}, unknown{false};
  std::vector<const void*> pointers;
  WorkPtr work;   // while it is held
  PyRef watched;  // then: a weak reference to its Python object
  Announced said;  // to the peers, where it is verified by plan
  PyRef verified;  // what a verifier in Python knows it by, where it has dealt with it
};

using TokenPtr = std::shared_ptr<Token>;

class UnderWay {
 public:
  static constexpr size_t HELD_LIMIT = 512;

  void hold(const TokenPtr& token, std::vector<TokenPtr>& dropped) {
    held_[token->index] = token;
    dropped.push_back(std::exchange(by_work_[token->work.get()], token));
    for (const void* pointer : token->pointers) dropped.push_back(std::exchange(by_pointer_[pointer], token));
  }

  TokenPtr oldest() const { return held_.empty() ? nullptr : held_.begin()->second; }
  bool full() const { return held_.size() >= HELD_LIMIT; }

  // False where somebody else has let go of it before. The Work itself stays with the token.
  bool let_go(const TokenPtr& token) {
    if (!held_.erase(token->index)) return false;
    auto found = by_work_.find(token->work.get());
    if (found != by_work_.end() && found->second == token) by_work_.erase(found);
    return true;
  }

  void forget_pointers(const TokenPtr& token) {
    for (const void* pointer : token->pointers) {
      auto found = by_pointer_.find(pointer);
      if (found != by_pointer_.end() && found->second == token) by_pointer_.erase(found);
    }
  }

  TokenPtr by_work(const c10d::Work* work) const {
    auto found = by_work_.find(work);
    return found == by_work_.end() ? nullptr : found->second;
  }

  TokenPtr by_pointer(const void* pointer) const {
    auto found = by_pointer_.find(pointer);
    return found == by_pointer_.end() ? nullptr : found->second;
  }

  std::vector<TokenPtr> held() const { return values(held_); }
  std::vector<TokenPtr> loose() const { return values(loose_); }
  std::vector<std::pair<uint32_t, TokenPtr>> synchronous() const { return {synchronous_.begin(), synchronous_.end()}; }

  void loosen(const TokenPtr& token) { loose_[token->index] = token; }
  bool tighten(const TokenPtr& token) { return loose_.erase(token->index) != 0; }
  bool any_loose() const { return !loose_.empty(); }

  TokenPtr synchronous_of(uint32_t thread) const {
    auto found = synchronous_.find(thread);
    return found == synchronous_.end() ? nullptr : found->second;
  }
  TokenPtr begin_synchronous(const TokenPtr& token) { return std::exchange(synchronous_[token->thread], token); }
  bool end_synchronous(const TokenPtr& token) {
    auto found = synchronous_.find(token->thread);
    if (found == synchronous_.end() || found->second != token) return false;
    synchronous_.erase(found);
    return true;
  }

  size_t pointers() const { return by_pointer_.size(); }

 private:
  template <class Map>
  static std::vector<TokenPtr> values(const Map& map) {
    std::vector<TokenPtr> all;
    all.reserve(map.size());
    for (const auto& entry : map) all.push_back(entry.second);
    return all;
  }

  std::map<uint64_t, TokenPtr> held_, loose_;  // by index: the first is the oldest
  std::unordered_map<const c10d::Work*, TokenPtr> by_work_;
  std::unordered_map<const void*, TokenPtr> by_pointer_;
  std::unordered_map<uint32_t, TokenPtr> synchronous_;  // by thread: issued by a call that waits for it right away
};

}  // namespace commlens
