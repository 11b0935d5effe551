// How ranks wake each other. commlens/boards/wakeup.py does the same in Python and explains it. Uses neither torch nor Python.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace commlens {

namespace bells {
constexpr uint64_t FIRST_WORD = 8;
constexpr uint64_t LAST_WORD = 512;
constexpr uint64_t LONGEST_NS = 20000000;
constexpr uint64_t PLACES = (LAST_WORD - FIRST_WORD) / 2;
constexpr uint64_t ANY = ~0ull;  // threads of the rank sleep on several bells

inline uint64_t bell_of(uint64_t rank) { return FIRST_WORD + rank % PLACES * 2; }
}  // namespace bells

// The words of a shared map as futexes, by their lower halves. Without the system call (a sandbox may forbid it), wait() sleeps for 50 us
// at most.
class Futexes {
 public:
  explicit Futexes(char* map) : map_(map), works_(call(map, FUTEX_WAKE, 1, nullptr) >= 0) {}

  void wait(uint64_t word, uint64_t expected, uint64_t timeout_ns) const {
    if (!works_) timeout_ns = std::min<uint64_t>(timeout_ns, 50000);
    timespec timeout{static_cast<time_t>(timeout_ns / 1000000000), static_cast<long>(timeout_ns % 1000000000)};
    if (works_)
      call(map_ + word * 8, FUTEX_WAIT, static_cast<uint32_t>(expected), &timeout);  // the caller checks again, whatever ended the wait
    else
      nanosleep(&timeout, nullptr);
  }

  void wake(uint64_t word) const {
    if (works_) call(map_ + word * 8, FUTEX_WAKE, INT_MAX, nullptr);
  }

 private:
  // Without FUTEX_PRIVATE_FLAG, since processes share the word.
  static long call(char* word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
  }

  char* const map_;
  const bool works_;
};

// The bells of a job on this node, as used by one rank.
class Bells {
 public:
  // `map` is the page that all ranks share.
  Bells(char* map, uint64_t rank) : map_(map), futexes_(map), mine_(bells::bell_of(rank)) { publish(place(mine_ + 1), 0); }

  Bells(const Bells&) = delete;
  Bells& operator=(const Bells&) = delete;

  // This rank has announced a collective: wake the peers that sleep on its bell.
  template <class Ranks>
  void ring(const Ranks& peers) {
    __atomic_fetch_add(place(mine_), 1, __ATOMIC_SEQ_CST);
    for (const auto peer : peers) {
      const uint64_t sleeps_on = load(bells::bell_of(peer) + 1);
      if (sleeps_on == mine_ || sleeps_on == bells::ANY) {
        futexes_.wake(mine_);
        return;
      }
    }
  }

  // Wake these ranks, on whichever bell they sleep, for another reason.
  template <class Ranks>
  void wake(const Ranks& ranks) {
    for (const auto rank : ranks) {
      const uint64_t bell = load(bells::bell_of(rank) + 1);
      if (bells::FIRST_WORD <= bell && bell < bells::LAST_WORD) futexes_.wake(bell);
    }
  }

  // Register this thread as about to sleep on the peer's bell. The caller then checks once more for the announcement, and calls sleep().
  uint64_t listen(uint64_t peer, uint64_t thread) {
    const uint64_t bell = bells::bell_of(peer);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto ours = find(thread);
      if (ours == sleepers_.end())
        sleepers_.emplace_back(thread, bell);
      else
        ours->second = bell;
      publish_sleepers();
    }
    return load(bell);
  }

  // Sleep until the peer's bell rings, at most this long; not at all if it has rung since listen() returned `heard`.
  void sleep(uint64_t peer, uint64_t heard, uint64_t at_most_ns) {
    futexes_.wait(bells::bell_of(peer), heard, std::min(at_most_ns, bells::LONGEST_NS));
  }

  // Unregister this thread.
  void awake(uint64_t thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto ours = find(thread);
    if (ours == sleepers_.end()) return;
    sleepers_.erase(ours);
    publish_sleepers();
  }

 private:
  using Sleepers = std::vector<std::pair<uint64_t, uint64_t>>;  // thread, and the bell that it sleeps on

  Sleepers::iterator find(uint64_t thread) {
    return std::find_if(sleepers_.begin(), sleepers_.end(), [thread](const auto& each) { return each.first == thread; });
  }

  // Publish the bell that this rank sleeps on. Under the mutex.
  void publish_sleepers() {
    uint64_t bell = sleepers_.empty() ? 0 : sleepers_[0].second;
    for (const auto& each : sleepers_)
      if (each.second != bell) bell = bells::ANY;
    __atomic_store_n(place(mine_ + 1), bell, __ATOMIC_SEQ_CST);
  }

  // All accesses have one total order. So a rank that rings and does not find this sleeper has rung before this rank listened, and this
  // rank finds the announcement when it checks once more.
  uint64_t load(uint64_t word) const { return __atomic_load_n(place(word), __ATOMIC_SEQ_CST); }

  uint64_t* place(uint64_t word) const { return word_at(map_, word * 8); }

  char* const map_;
  const Futexes futexes_;
  const uint64_t mine_;
  std::mutex mutex_;
  Sleepers sleepers_;
};

}  // namespace commlens
