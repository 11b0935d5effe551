// Collectives whose caller waits for them in its next breath: a thread has one of them at most, and finds it without asking anybody.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tokens.hpp"

namespace commlens {

class Synchronous {
 public:
  // `work` is what the caller waits for; it is only compared.
  void begins(const TokenPtr& token, const void* work) {
    Place& place = mine();
    place.work = work;
    TokenPtr former = token;
    std::lock_guard<std::mutex> lock(place.mutex);
    place.token.swap(former);
  }

  // This thread's, where it waits for this Work. Each is found once.
  TokenPtr found_by(const void* work) {
    const Place& place = mine();
    return work && place.work == work ? take(place.token) : nullptr;
  }

  // This thread's, whatever it waits for.
  TokenPtr found() { return take(mine().token); }

  // Another collective has a Work at this address now.
  void not_this(const void* work) {
    Place& place = mine();
    if (place.work == work) place.work = nullptr;
  }

  // For a thread that looks on: all of them, ended ones too.
  std::vector<TokenPtr> all() {
    std::vector<TokenPtr> found;
    std::vector<std::shared_ptr<Place>> left;  // by threads that are gone
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = places_.size(); i-- > 0;) {
      auto& place = places_[i];
      bool ended = true;
      {
        std::lock_guard<std::mutex> inner(place->mutex);
        if (place->token) {
          found.push_back(place->token);
          ended = place->token->phase == Token::ENDED;
        }
      }
      if (!ended || place.use_count() > 1) continue;
      left.push_back(std::move(place));
      places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return found;
  }

 private:
  struct Place {
    std::mutex mutex;
    TokenPtr token;  // set by its own thread, under the mutex
    const void* work = nullptr;  // its own thread's
  };

  Place& mine() {
    thread_local uint64_t owner = 0;
    thread_local std::shared_ptr<Place> place;
    if (owner != identity_) {
      place = std::make_shared<Place>();
      owner = identity_;
      std::lock_guard<std::mutex> lock(mutex_);
      places_.push_back(place);
    }
    return *place;
  }

  static TokenPtr take(const TokenPtr& token) {
    auto issued = Token::ISSUED;
    return token && token->phase.compare_exchange_strong(issued, Token::WAITED_FOR) ? token : nullptr;
  }

  const uint64_t identity_ = next_age();
  std::mutex mutex_;
  std::vector<std::shared_ptr<Place>> places_;
};

}  // namespace commlens
