// Collectives whose caller waits for them at once. A thread has at most one, and finds it without a lock.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tokens.hpp"

namespace commlens {

class Synchronous {
 public:
  // `work` is the Work that the caller waits for; only its address is used.
  void issued(const TokenPtr& token, const void* work) {
    Slot& slot = own_slot();
    slot.work = work;
    TokenPtr former = token;
    std::lock_guard<std::mutex> lock(slot.mutex);
    slot.token.swap(former);
  }

  // This thread's collective, if its Work is this one. Each is returned once.
  TokenPtr take_by(const void* work) {
    const Slot& slot = own_slot();
    return work && slot.work == work ? take_issued(slot.token) : nullptr;
  }

  // This thread's collective.
  TokenPtr take() { return take_issued(own_slot().token); }

  // Another collective now has a Work at this address.
  void forget_work(const void* work) {
    Slot& slot = own_slot();
    if (slot.work == work) slot.work = nullptr;
  }

  // The collectives of all threads, including ended ones.
  std::vector<TokenPtr> all() {
    std::vector<TokenPtr> found;
    std::vector<std::shared_ptr<Slot>> left;  // by threads that have ended
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = slots_.size(); i-- > 0;) {
      auto& slot = slots_[i];
      bool ended = true;
      {
        std::lock_guard<std::mutex> inner(slot->mutex);
        if (slot->token) {
          found.push_back(slot->token);
          ended = slot->token->phase == Token::ENDED;
        }
      }
      if (!ended || slot.use_count() > 1) continue;
      left.push_back(std::move(slot));
      slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return found;
  }

 private:
  struct Slot {
    std::mutex mutex;
    TokenPtr token;  // set by its own thread, under the mutex
    const void* work = nullptr;  // used only by its own thread
  };

  Slot& own_slot() {
    thread_local uint64_t owner = 0;
    thread_local std::shared_ptr<Slot> slot;
    if (owner != identity_) {
      slot = std::make_shared<Slot>();
      owner = identity_;
      std::lock_guard<std::mutex> lock(mutex_);
      slots_.push_back(slot);
    }
    return *slot;
  }

  static TokenPtr take_issued(const TokenPtr& token) {
    auto issued = Token::ISSUED;
    return token && token->phase.compare_exchange_strong(issued, Token::WAITED_FOR) ? token : nullptr;
  }

  const uint64_t identity_ = next_generation();
  std::mutex mutex_;
  std::vector<std::shared_ptr<Slot>> slots_;
};

}  // namespace commlens
