// Several threads write one box as those of a rank do; a reader in this process and one in another hold every record that they
// accept to be whole. All that a record and a blob hold follows from a number in them.
#pragma once

#include <sched.h>
#include <sys/wait.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "mapped.hpp"

namespace check {

constexpr uint64_t RECORDS_PER_ASKED = 5;

inline std::string group_text(uint64_t n) {
  return "{\"k\":\"group\",\"name\":\"" + std::to_string(n) + "\",\"ranks\":\"0-" + std::to_string(n % 1000 + 1) + "\"}";
}

inline std::string asked_text(uint64_t n) {
  const std::string text = std::to_string(n);
  return "{\"k\":\"asked\",\"op\":\"" + text + "\",\"in\":[[[" + text + "," + text + "],\"float32\"]]}";
}

inline std::string stack_text(uint64_t n) {
  std::string text = "{\"k\":\"stack\",\"f\":[";
  for (uint64_t i = 0; i <= n % 10; ++i) text += std::string(i ? "," : "") + "[\"/home/me/train.py\"," + std::to_string(n % 1000000) + ",\"f\"]";
  return text + "]}";
}

inline uint64_t ticks_of(uint64_t index, uint64_t life) { return (index & TAG_MASK) * 16 + life + 1; }

inline Record record_of(uint64_t index, uint64_t n, uint64_t epoch) {
  Record record{};
  record.index = index;
  record.announced = epoch + index * 1000;
  record.sequence_number = n;
  record.step = index * 7;
  record.coalescing_id = index * 11;
  record.tag = -static_cast<int64_t>(index);
  record.thread = static_cast<uint32_t>(index & 0x7FFFFFFF);
  record.flags = FLAG_ENTERED;
  record.peer = static_cast<int32_t>(index % 5) - 1;
  record.members = static_cast<uint32_t>(index % 9);
  return record;
}

// What the threads share besides the box. `paced`: nobody writes into a slot whose former owner is not done, as in a job, where a
// lap takes longer than a thread sleeps; otherwise slots are written by several threads at once.
struct Crowd {
  Box box;
  const Geometry at;
  char* const map;
  const bool paced;
  std::unique_ptr<std::atomic<uint64_t>[]> done_in_slot;
  std::atomic<bool> stop{false};

  Crowd(char* map, const Geometry& at, bool paced)
      : box(map, at.capacity, at.side_at, at.side_size, at.epoch),
        at(at), map(map), paced(paced), done_in_slot(new std::atomic<uint64_t>[at.capacity]()) {}

  uint64_t moment(uint64_t index, uint64_t life) const { return at.epoch + ticks_of(index, life) * TICK_NS; }

  void write(uint64_t thread, uint64_t threads) {
    uint64_t group = 0, asked = 0, stack = 0, group_number = 0;
    for (uint64_t n = thread; !stop.load(std::memory_order_relaxed); n += threads) {
      if (group <= box.side_floor()) group = box.append(group_text(group_number = n));
      asked = box.append(asked_text(n));
      stack = box.append(stack_text(n));
      for (uint64_t i = 0; i < RECORDS_PER_ASKED; ++i) one(n, group, asked, stack);
    }
  }

  void one(uint64_t n, uint64_t group, uint64_t asked, uint64_t stack) {
    const uint64_t index = box.next_index();
    auto& slot = done_in_slot[(index - 1) % at.capacity];
    while (paced && index > at.capacity && slot.load(std::memory_order_relaxed) != index - at.capacity) sched_yield();
    Record record = record_of(index, n, at.epoch);
    record.group = group;
    record.asked = asked;
    record.stack = stack;
    const uint64_t offset = box.announce(record);
    if (index % 2) box.mark(offset, RETURNED, index, moment(index, 0));
    box.wait_began(offset, index, moment(index, 0), index & 0xFFFF, index % 2 == 0);
    box.wait_completed(offset, index, moment(index, 1), index & 0xFFFF);
    slot.store(index, std::memory_order_relaxed);
  }

  // The watchdog thread's part: header words, and reduce ops of records that other threads wrote.
  void watch() {
    for (uint64_t round = 1; !stop.load(std::memory_order_relaxed); ++round) {
      box.word(STEPS, round);
      const uint64_t last = box.last_index();
      for (uint64_t index = last > 4 ? last - 4 : 1; index <= last; ++index)
        box.mark_value(HEADER_SIZE + (index - 1) % at.capacity * RECORD_SIZE, REDUCE_OP, index, ticks_of(index, 2));
      box.lost(round % 8);
      sched_yield();
    }
  }
};

// One look at a box that may be written meanwhile.
class Reader {
 public:
  struct Counts {
    uint64_t looks = 0, whole = 0, torn = 0, blobs = 0, dead = 0, completed = 0;
  };

  Reader(char* map, const Geometry& at) : map_(map), at_(at) {}

  Counts counts;

  void look() {
    const uint64_t issued = observe(word_at(map_, NEXT_INDEX));
    if (issued < issued_) fail("the number of records went back from %llu to %llu", wide(issued_), wide(issued));
    issued_ = issued;
    for (uint64_t slot = 0; slot < at_.capacity; ++slot) record(slot);
    ++counts.looks;
  }

 private:
  void record(uint64_t slot) {
    char* from = map_ + HEADER_SIZE + slot * RECORD_SIZE;
    uint64_t words[RECORD_CRC_AT / 8];
    const uint32_t crc = __atomic_load_n(reinterpret_cast<uint32_t*>(from + RECORD_CRC_AT), __ATOMIC_ACQUIRE);
    for (uint64_t i = 0; i < RECORD_CRC_AT / 8; ++i) words[i] = observe(word_at(from, i * 8));
    Record got;
    std::memcpy(&got, words, sizeof got);
    if (!got.index || crc32(words, sizeof words) != crc) {
      counts.torn += got.index != 0;
      return;
    }
    ++counts.whole;
    if ((got.index - 1) % at_.capacity != slot) fail("record %llu is in slot %llu", wide(got.index), wide(slot));
    Record wanted = record_of(got.index, got.sequence_number, at_.epoch);
    wanted.group = got.group;
    wanted.asked = got.asked;
    wanted.stack = got.stack;
    if (std::memcmp(&wanted, &got, sizeof got)) fail("record %llu was accepted and is not what was written", wide(got.index));
    life(from, got.index);
    blob(got.group, nullptr);
    const std::string asked = asked_text(got.sequence_number), stack = stack_text(got.sequence_number);
    blob(got.asked, &asked);
    blob(got.stack, &stack);
  }

  void life(char* from, uint64_t index) {
    auto is = [&](uint64_t field, uint64_t value) {
      const uint64_t word = observe(word_at(from, field));
      if (word >> 16 && (word & TAG_MASK) == (index & TAG_MASK) && word >> 16 != value)
        fail("the word at %llu of record %llu is %llx", wide(field), wide(index), wide(word));
    };
    is(RETURNED, ticks_of(index, 0));
    is(WAIT_BEGAN, ticks_of(index, 0));
    is(WAIT_ENDED, ticks_of(index, 1));
    is(DONE, ticks_of(index, 1));
    is(REDUCE_OP, ticks_of(index, 2));
    const uint64_t outcome = observe(word_at(from, OUTCOME));
    const uint64_t waits = (index & 0xFFFF) << 16, completed = waits | OUTCOME_COMPLETED << 8 | HOW_WAIT;
    if ((outcome & TAG_MASK) != (index & TAG_MASK) || !(outcome >> 16)) return;
    if (outcome >> 16 != waits && outcome >> 16 != completed) fail("record %llu ended as %llx", wide(index), wide(outcome));
    counts.completed += outcome >> 16 == completed;
  }

  // A blob is written before the record that refers to it, and dead before it is overwritten.
  void blob(uint64_t position, const std::string* wanted) {
    const uint64_t offset = (position - 1) % at_.side_size;
    char* from = map_ + at_.side_at + offset;
    const uint64_t head = observe(word_at(from, 0)), own = observe(word_at(from, 8)), length = head & 0xFFFFFFFF;
    std::string payload;
    if (position % BLOB_ALIGN == 1 && offset + BLOB_HEAD + length <= at_.side_size)
      for (uint64_t i = 0; i < length; ++i) payload += __atomic_load_n(from + BLOB_HEAD + i, __ATOMIC_ACQUIRE);
    if (position + at_.side_size <= observe(word_at(map_, SIDE_HEAD))) {
      ++counts.dead;
      return;
    }
    const uint32_t crc = crc32(payload.data(), payload.size(), static_cast<uint32_t>(position));
    if (own != position || payload.size() != length || crc != head >> 32) fail("the blob at %llu is alive and not whole", wide(position));
    if (wanted ? payload != *wanted : payload != group_text(std::strtoull(payload.c_str() + 21, nullptr, 10)))
      fail("the blob at %llu is not what was written: %s", wide(position), payload.c_str());
    ++counts.blobs;
  }

  char* const map_;
  const Geometry at_;
  uint64_t issued_ = 0;
};

inline void print(const char* who, const Reader::Counts& counts) {
  std::printf("%s: %llu looks, %llu records whole, %llu torn, %llu blobs whole, %llu overwritten\n", who, wide(counts.looks), wide(counts.whole),
              wide(counts.torn), wide(counts.blobs), wide(counts.dead));
}

// For `milliseconds`, with a reader in a thread and one in a process of its own.
inline void run_crowd(uint64_t milliseconds, uint64_t threads, bool paced) {
  constexpr uint64_t CAPACITY = 64, SIDE = 4096;  // so small that both rings are lapped while somebody reads
  const Geometry at{CAPACITY, HEADER_SIZE + CAPACITY * RECORD_SIZE, SIDE, 1000000000};
  char* map = map_shared(at.side_at + SIDE);
  auto* over = reinterpret_cast<uint64_t*>(map_shared(4096));
  std::fflush(stdout);
  const pid_t outside = fork();
  if (outside == 0) {
    Reader reader(map, at);
    while (!observe(over)) reader.look();
    print("a reader in another process", reader.counts);
    std::fflush(stdout);
    _exit(0);
  }
  Crowd crowd(map, at, paced);
  Reader inside(map, at);
  std::vector<std::thread> all;
  for (uint64_t thread = 1; thread <= threads; ++thread) all.emplace_back([&crowd, thread, threads] { crowd.write(thread, threads); });
  all.emplace_back([&crowd] { crowd.watch(); });
  all.emplace_back([&] {
    while (!crowd.stop.load(std::memory_order_relaxed)) inside.look();
  });
  usleep(static_cast<useconds_t>(milliseconds * 1000));
  crowd.stop = true;
  for (auto& thread : all) thread.join();
  publish(over, 1);
  int status = 0;
  if (waitpid(outside, &status, 0) != outside || status) fail("the reader in another process ended with %x", static_cast<unsigned>(status));
  print("a reader in a thread", inside.counts);
  Reader after(map, at);
  after.look();
  const uint64_t issued = observe(word_at(map, NEXT_INDEX));
  if (issued < 10 * CAPACITY) fail("only %llu records were written", wide(issued));
  if (issued != crowd.box.last_index() || issued + 1 != crowd.box.next_index()) fail("%llu records were counted, not all", wide(issued));
  if (paced && (after.counts.whole != CAPACITY || after.counts.completed != CAPACITY))
    fail("%llu of the last %llu records are whole, %llu completed", wide(after.counts.whole), wide(CAPACITY), wide(after.counts.completed));
  if (!inside.counts.whole || !inside.counts.blobs) fail("the reader accepted nothing");
  if (*word_at(map, LOST) != 7) fail("the greatest count of lost records was not kept");
  std::printf("%llu records by %llu threads, %s\n", wide(issued), wide(threads), paced ? "a slot's owners in turn" : "slots written by several at once");
}

// Until it is killed.
inline void write_for_ever(const char* path, uint64_t threads) {
  MappedFile file(path);
  Crowd crowd(file.map, Geometry::of(file.map), true);
  std::vector<std::thread> all;
  for (uint64_t thread = 1; thread <= threads; ++thread) all.emplace_back([&crowd, thread, threads] { crowd.write(thread, threads); });
  all.emplace_back([&crowd] { crowd.watch(); });
  std::puts("writing");
  std::fflush(stdout);
  for (auto& thread : all) thread.join();
}

}  // namespace check
