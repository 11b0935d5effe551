// Coalesced groups: the collectives that a thread issues between ProcessGroup._start_coalescing and _end_coalescing.
#pragma once

#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "interned_args.hpp"
#include "layout.hpp"
#include "threads.hpp"

namespace commlens {

// A group under construction by one thread.
struct CoalescedGroup {
  uint64_t id = 0, members = 0, number = 0;
  ArgsPtr first;
};

class CoalescedGroups {
 public:
  void start() {
    CoalescedGroup group;
    group.id = ids_.fetch_add(1) + 1;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!building_.count(this_thread())) count_.fetch_add(1);
    std::swap(building_[this_thread()], group);
  }

  // If this thread is building a group, make `args` its next member and write the sequence number into the record: collectives share
  // that of the group, point-to-point ops keep that of their pair.
  bool join(const ArgsPtr& args, Record& record) {
    if (!count_.load(std::memory_order_relaxed)) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = building_.find(this_thread());
    if (found == building_.end()) return false;
    CoalescedGroup& group = found->second;
    if (!group.members++) group.first = args;
    if (!args->point_to_point && !group.number) group.number = args->number->fetch_add(1) + 1;
    record.sequence_number = args->point_to_point ? args->number->fetch_add(1) + 1 : group.number;
    record.coalescing_id = group.id;
    record.flags |= FLAG_COALESCED_MEMBER;
    return true;
  }

  // Remove the group that `thread` has built and return it; none if it has no members.
  std::optional<CoalescedGroup> take(uint32_t thread) {
    std::optional<CoalescedGroup> group;
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
  std::unordered_map<uint32_t, CoalescedGroup> building_;  // by thread
  std::atomic<uint64_t> count_{0}, ids_{0};
};

}  // namespace commlens
