// Completion hooks (torch 2.15 and later): the backend itself tells when an op is complete, by the key of the op's Work, without a query of
// the device by us. It tells nothing of an op that failed. Its abort hooks tell when its watchdog gives an op up.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "box.hpp"
#include "clock.hpp"

namespace commlens {

// An op of such a backend. It holds no Work and no Python object: the backend's thread may drop it, without the GIL.
struct Flight {
  Flight(uint64_t index, uint64_t offset, uint64_t since) : index(index), offset(offset), since(since) {}
  const uint64_t index, offset, since;
  std::atomic<uint64_t> done{0};  // when it completed; 0: not yet
};

using FlightPtr = std::shared_ptr<Flight>;

// The ops in flight of one backend. As the box and the engine that has it, it is never freed: the backend copies its hooks for each op that
// completes, and a function that holds no more than a pointer is copied without an allocation.
class CompletionHooks {
 public:
  explicit CompletionHooks(Box& box) : box_(box) {}

  // Null if the backend has no completion hooks. Before the first op is issued, and without locks of ours.
  template <class Backend>
  static auto attach(Backend& backend, Box& box) -> decltype(backend.supportsCompletionHooks(), static_cast<CompletionHooks*>(nullptr)) {
    if (!backend.supportsCompletionHooks()) return nullptr;
    static std::atomic<int64_t> next_id{HOOK_ID};
    auto* const hooks = new CompletionHooks(box);
    backend.registerCompletionHook(next_id.fetch_add(1), [hooks](const auto& args) { hooks->completed(args.completionKey, args.duration_ms); });
    // Just before the backend's watchdog aborts the process. More than once is no harm.
    if (backend.supportsAbortHooks()) backend.registerAbortHook(next_id.fetch_add(1), [hooks] { hooks->box_.word(GAVE_UP, now_ns()); });
    return hooks;
  }
  template <class... Others>
  static CompletionHooks* attach(const Others&...) {
    return nullptr;
  }

  // The backend's call returned this Work. Null if it has no key of its own, only its address: no hook may ever tell of it.
  template <class Work>
  FlightPtr issued(const Work& work, uint64_t index, uint64_t offset, uint64_t since) {
    const auto key = key_of(work);
    if (!key || *key == reinterpret_cast<uintptr_t>(&work)) return nullptr;
    auto flight = std::make_shared<Flight>(index, offset, since);
    uint64_t done = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // It may have completed before its call returned.
      for (auto early = early_.rbegin(); early != early_.rend() && early->second >= since && !done; ++early)
        if (early->first == *key) done = early->second;
      if (!done) add(*key, flight);
    }
    if (done) finish(*flight, done);
    return flight;
  }

  uint64_t progress() const { return progress_.load(std::memory_order_relaxed); }  // when an op last completed

 private:
  static constexpr size_t EARLY_MAX = 1024;
  static constexpr int64_t HOOK_ID = 0x636f6d6d6c656e;  // far from the small ids that programs choose

  template <class Work>
  static auto key_of(const Work& work) -> decltype(std::optional<uint64_t>(work.getCompletionKey())) {
    return work.getCompletionKey();
  }
  template <class... Others>
  static std::optional<uint64_t> key_of(const Others&...) {
    return std::nullopt;
  }

  // Under the mutex. Takes the place of an op that has completed, if there is one, so that the map allocates nothing in a steady state.
  void add(uint64_t key, const FlightPtr& flight) {
    if (!spare_) {
      in_flight_[key] = flight;
      return;
    }
    spare_.key() = key;
    in_flight_.insert(std::move(spare_)).position->second = flight;
  }

  // In the backend's watchdog thread, or in one that issues an op, perhaps with locks of the backend.
  void completed(uint64_t key, std::optional<float> duration_ms) noexcept {
    const uint64_t now = now_ns();
    FlightPtr flight;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      progress_.store(now, std::memory_order_relaxed);
      const auto found = in_flight_.find(key);
      if (found == in_flight_.end()) {
        early_.emplace_back(key, now);
        if (early_.size() > EARLY_MAX) early_.pop_front();
        return;
      }
      flight = std::move(found->second);
      spare_ = in_flight_.extract(found);
    }
    if (duration_ms && *duration_ms >= 0)
      box_.mark_value(flight->offset, DURATION, flight->index, static_cast<uint64_t>(*duration_ms * 1e6f) / TICK_NS);
    finish(*flight, now);
  }

  void finish(Flight& flight, uint64_t now) {
    box_.mark(flight.offset, DONE, flight.index, now);
    box_.mark_outcome(flight.offset, flight.index, OUTCOME_COMPLETED, HOW_NATIVE_RECORDER);
    flight.done.store(now, std::memory_order_release);
  }

  Box& box_;
  std::mutex mutex_;
  std::unordered_map<uint64_t, FlightPtr> in_flight_;  // by the key of its Work
  decltype(in_flight_)::node_type spare_;
  std::deque<std::pair<uint64_t, uint64_t>> early_;    // keys that completed and were not known, and when
  std::atomic<uint64_t> progress_{0};
};

}  // namespace commlens
