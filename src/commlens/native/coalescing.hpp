// Coalesced groups: collectives that a thread issues between ProcessGroup._start_coalescing and _end_coalescing are members of one.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "interned_args.hpp"
#include "layout.hpp"
#include "threads.hpp"

namespace commlens {

// One that a thread is building.
struct Coalescing {
  uint64_t id = 0, members = 0, number = 0;
  ArgsPtr first;
};

class Coalescings {
 public:
  void starts() {
    Coalescing group;
    group.id = ids_.fetch_add(1) + 1;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!building_.count(this_thread())) count_.fetch_add(1);
    std::swap(building_[this_thread()], group);
  }

  // Where this thread is building one, `asked` is its next member: its number is put into the record. Collectives share the
  // group's number, messages keep their pair's.
  bool joined(const ArgsPtr& args, Record& record) {
    if (!count_.load(std::memory_order_relaxed)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = building_.find(this_thread());
    if (found == building_.end()) return false;
    Coalescing& group = found->second;
    if (!group.members++) group.first = args;
    if (!args->point_to_point && !group.number) group.number = args->number->fetch_add(1) + 1;
    record.sequence_number = args->point_to_point ? args->number->fetch_add(1) + 1 : group.number;
    record.coalescing_id = group.id;
    record.flags |= FLAG_COALESCED_MEMBER;
    return true;
  }

  // The group that `thread` has built; none where it has no members.
  std::optional<Coalescing> take(uint32_t thread) {
    std::optional<Coalescing> group;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = building_.find(thread);
    if (found == building_.end()) return group;
    if (found->second.members) group = std::move(found->second);
    building_.erase(found);
    count_.fetch_sub(1);
    return group;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<uint32_t, Coalescing> building_;  // by thread
  std::atomic<uint64_t> count_{0}, ids_{0};
};

}  // namespace commlens
