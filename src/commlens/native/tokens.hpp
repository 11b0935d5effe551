// The collectives in flight. commlens/capture/completion.py does the same in Python and explains it. The completion's mutex guards
// everything here; a dropped token is handed to the caller, to be destroyed after it releases the mutex.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "interned_args.hpp"

namespace commlens {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct Token {
  enum Phase : uint8_t { ISSUED, WAITED_FOR, ENDED };
  uint64_t index = 0, offset = 0, since = 0, number = 0, tagged_number = 0, stack = 0;
  ArgsPtr args;
  uint32_t thread = 0;
  bool coalesced = false, captured = false;
  std::atomic<Phase> phase{ISSUED};  // of a synchronous collective
  std::atomic<bool> waiting{false}, unknown{false};
  std::vector<const void*> pointers;
  uint64_t backend_number = 0;  // the backend's own number of a collective that runs on a device; 0 for none
  c10::intrusive_ptr<c10::ivalue::Future> result;  // how a message on a device ended, as torch's watchdog thread sets it; holds no tensors
  FlightPtr flight;  // if its backend has completion hooks
  WorkPtr work;   // while it is held
  PyRef watched;  // after that: a weak reference to its Python object
  Announced announced;  // to the peers, if it is verified by plan
  PyRef verified;  // its token in Python, if the verifier there has handled it
};

using TokenPtr = std::shared_ptr<Token>;

// The Works of asynchronous calls for which nobody has waited, nor asked for a state or future. They are known by their address, so none
// is kept alive: when another Work has the same address, the former one is freed, and can be waited for no more. Not of calls on a device,
// where a program may wait for the stream instead.
class Unwaited {
 public:
  void issued(const void* work, const Token& token) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (open_.size() >= LIMIT && !open_.count(work)) return;
    uint64_t& stack = open_[work];
    if (stack) count(stack, freed_);
    stack = token.stack;
  }

  void handled(const void* work) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(work);
  }

  // By the position of their stack, how many.
  std::unordered_map<uint64_t, uint64_t> found() {
    std::lock_guard<std::mutex> lock(mutex_);
    auto all = freed_;
    for (const auto& entry : open_) count(entry.second, all);
    return all;
  }

 private:
  static constexpr size_t LIMIT = 4096;

  static void count(uint64_t stack, std::unordered_map<uint64_t, uint64_t>& in) {
    if (in.size() < LIMIT || in.count(stack)) ++in[stack];
  }

  std::mutex mutex_;
  std::unordered_map<const void*, uint64_t> open_;  // to the position of the stack
  std::unordered_map<uint64_t, uint64_t> freed_;
};

class InFlight {
 public:
  static constexpr size_t HELD_LIMIT = 512;

  void hold(const TokenPtr& token, std::vector<TokenPtr>& dropped) {
    held_.push_back(token);
    for (const void* pointer : token->pointers)
      if (TokenPtr former = std::exchange(by_pointer_[pointer], token)) dropped.push_back(std::move(former));
  }

  TokenPtr oldest() const { return held_.empty() ? nullptr : held_.front(); }
  bool full() const { return held_.size() >= HELD_LIMIT; }

  // False if another thread has removed it. The Work itself stays with the token.
  bool remove(const TokenPtr& token) {
    const auto found = std::find(held_.begin(), held_.end(), token);
    if (found == held_.end()) return false;
    held_.erase(found);
    return true;
  }

  void forget_pointers(const TokenPtr& token) {
    for (const void* pointer : token->pointers) {
      auto found = by_pointer_.find(pointer);
      if (found != by_pointer_.end() && found->second == token) by_pointer_.erase(found);
    }
  }

  TokenPtr by_work(const void* work) const {
    for (const auto& token : held_)
      if (token->work.get() == work) return token;
    return nullptr;
  }

  TokenPtr by_pointer(const void* pointer) const {
    auto found = by_pointer_.find(pointer);
    return found == by_pointer_.end() ? nullptr : found->second;
  }

  const std::vector<TokenPtr>& held() const { return held_; }
  std::vector<TokenPtr> weakly_held() const {
    std::vector<TokenPtr> all;
    for (const auto& entry : weakly_held_) all.push_back(entry.second);
    return all;
  }

  void hold_weakly(const TokenPtr& token) { weakly_held_[token->index] = token; }
  bool drop_weak(const TokenPtr& token) { return weakly_held_.erase(token->index) != 0; }

  size_t size() const { return held_.size() + weakly_held_.size(); }
  size_t pointers() const { return by_pointer_.size(); }

 private:
  std::vector<TokenPtr> held_;         // in order of issue; few, unless no thread waits
  std::map<uint64_t, TokenPtr> weakly_held_;  // by index
  std::unordered_map<const void*, TokenPtr> by_pointer_;
};

}  // namespace commlens
