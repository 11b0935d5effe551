// Writes the records and the side table of a black box. commlens/blackbox/writer.py is the same in Python; it also makes the file and
// writes its header. docs/protocol.md defines each byte. Uses neither torch nor Python, so that a driver can test it alone.
#pragma once

#include <atomic>
#include <mutex>
#include <string_view>

#include "clock.hpp"
#include "crc32.hpp"
#include "layout.hpp"
#include "memory.hpp"

namespace commlens {

class Box {
 public:
  // `map` is the whole mapped file; `epoch` is CLOCK_MONOTONIC at its creation, in ns.
  Box(char* map, uint64_t capacity, uint64_t side_at, uint64_t side_size, uint64_t epoch)
      : map_(map), capacity_(capacity), side_at_(side_at), side_size_(side_size), epoch_(epoch) {}

  Box(const Box&) = delete;
  Box& operator=(const Box&) = delete;

  uint64_t capacity() const { return capacity_; }
  uint64_t last_index() const { return last_.load(std::memory_order_relaxed); }
  uint64_t side_floor() const { return floor_.load(std::memory_order_relaxed); }
  uint64_t steps() const { return __atomic_load_n(word_at(map_, STEPS), __ATOMIC_RELAXED); }
  bool overwritten(uint64_t index) const { return index + capacity_ <= last_index(); }

  // Each index is drawn once, and its slot belongs to the thread that drew it.
  uint64_t next_index() { return drawn_.fetch_add(1, std::memory_order_relaxed) + 1; }

  void word(uint64_t offset, uint64_t value) { publish(word_at(map_, offset), value); }

  void lost(uint64_t count) { store_max(word_at(map_, LOST), count); }

  // A reader accepts a record only if its checksum is right, so a record that is half written, perhaps by a writer that was killed, does
  // no harm.
  uint64_t announce(const Record& record) {
    const uint64_t offset = HEADER_SIZE + (record.index - 1) % capacity_ * RECORD_SIZE;
    char* slot = map_ + offset;
    store_bytes(slot, &record, sizeof record);
    store_u32(slot + RECORD_CRC_AT, crc32(&record, sizeof record), __ATOMIC_RELEASE);
    seen(record.index);
    return offset;
  }

  // Note that a record with this index has been written, by C++ or by Python.
  void seen(uint64_t index) {
    store_max(word_at(map_, NEXT_INDEX), index);
    uint64_t last = last_.load(std::memory_order_relaxed);
    while (last < index && !last_.compare_exchange_weak(last, index, std::memory_order_relaxed)) {
    }
  }

  // Life words. None is written once a newer record has the slot, since that would overwrite the newer record's words.
  void mark(uint64_t offset, uint64_t field, uint64_t index, uint64_t now) { mark_value(offset, field, index, ticks(now)); }

  void mark_value(uint64_t offset, uint64_t field, uint64_t index, uint64_t value) {
    if (!overwritten(index)) word(offset + field, value << 16 | (index & TAG_MASK));
  }

  void mark_outcome(uint64_t offset, uint64_t index, uint64_t outcome, uint64_t how, uint64_t thread = 0) {
    if (!overwritten(index)) word(offset + OUTCOME, thread << 32 | outcome << 24 | how << 16 | (index & TAG_MASK));
  }

  // `thread` has waited since `now`. With `returned`, the issuing call returned just before.
  void wait_began(uint64_t offset, uint64_t index, uint64_t now, uint64_t thread, bool returned) {
    if (overwritten(index)) return;
    const uint64_t began = ticks(now) << 16 | (index & TAG_MASK);
    if (returned) word(offset + RETURNED, began);
    word(offset + WAIT_BEGAN, began);
    word(offset + WAIT_ENDED, 0);
    word(offset + DONE, 0);
    word(offset + OUTCOME, thread << 32 | (index & TAG_MASK));
  }

  void wait_completed(uint64_t offset, uint64_t index, uint64_t now, uint64_t thread) {
    if (overwritten(index)) return;
    const uint64_t ended = ticks(now) << 16 | (index & TAG_MASK);
    word(offset + WAIT_ENDED, ended);
    word(offset + DONE, ended);
    word(offset + OUTCOME, thread << 32 | OUTCOME_COMPLETED << 24 | HOW_WAIT << 16 | (index & TAG_MASK));
  }

  // A thread waited for it where nothing noted it, unless it is noted already.
  void waited(uint64_t offset, uint64_t index, uint64_t began, uint64_t ended) {
    const uint64_t noted = observe(word_at(map_, offset + WAIT_BEGAN));
    if (noted && (noted & TAG_MASK) == (index & TAG_MASK)) return;
    mark(offset, WAIT_ENDED, index, ended);
    mark(offset, WAIT_BEGAN, index, began);
  }

  // Appends a blob to the side table and returns its position; 0 if it is too large.
  uint64_t append(std::string_view payload) {
    if (payload.size() > BLOB_MAX) return 0;
    const uint64_t need = (BLOB_HEAD + payload.size() + BLOB_ALIGN - 1) / BLOB_ALIGN * BLOB_ALIGN;
    std::lock_guard<std::mutex> lock(side_mutex_);
    const uint64_t room = side_size_ - side_head_ % side_size_;
    if (room < need) side_head_ += room;
    const uint64_t position = side_head_ + 1;
    char* at = map_ + side_at_ + side_head_ % side_size_;
    side_head_ += need;
    floor_.store(side_head_ > side_size_ / 2 ? side_head_ - side_size_ / 2 : 0, std::memory_order_relaxed);
    // The head moves first: a reader must know that the old blobs here are dead before they are overwritten.
    word(SIDE_HEAD, side_head_);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t length = static_cast<uint32_t>(payload.size());
    const uint32_t crc = crc32(payload.data(), payload.size(), static_cast<uint32_t>(position));
    store_bytes(at + BLOB_HEAD, payload.data(), payload.size());
    store_bytes(at + 8, &position, 8);
    const uint64_t head = static_cast<uint64_t>(crc) << 32 | length;
    publish(word_at(at, 0), head);
    return position;
  }

  uint64_t ticks(uint64_t now) const { return (now - epoch_) / TICK_NS; }

 private:
  char* const map_;
  const uint64_t capacity_, side_at_, side_size_, epoch_;
  std::atomic<uint64_t> drawn_{0}, last_{0}, floor_{0};
  std::mutex side_mutex_;
  uint64_t side_head_ = 0;
};

}  // namespace commlens
