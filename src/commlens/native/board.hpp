// The announcement boards of a rank and of its peers. commlens/boards/board.py does the same in Python; it also makes and maps the files,
// and defines each byte. Uses neither torch nor Python, so that a driver can test it alone.
#pragma once

#include <atomic>
#include <cstdint>

#include "memory.hpp"

namespace commlens {

namespace board {
constexpr uint64_t MAGIC = 0x31445242534C4D43;
constexpr uint64_t HEADER_SIZE = 4096;
constexpr uint64_t CHANNELS = 512;
constexpr uint64_t ENTRIES = 16;
constexpr uint64_t ENTRY_SIZE = 40;  // number, signature, blob position, reduce op's code + 1, check
constexpr uint64_t SLOT_HEAD_SIZE = 16;  // key, blob position of the channel's description
constexpr uint64_t LAST_AT = SLOT_HEAD_SIZE + ENTRIES * ENTRY_SIZE;
constexpr uint64_t SLOT_SIZE = 1024;
constexpr uint64_t BLOBS_SIZE = 512 * 1024;
constexpr uint64_t SIZE = HEADER_SIZE + CHANNELS * SLOT_SIZE + BLOBS_SIZE;
constexpr uint64_t ROUND_SHIFT = 48;
constexpr uint64_t USED = 64;
constexpr uint64_t HEAD = 72;
constexpr uint64_t CLOSED = 112;
constexpr uint64_t ACTIVE = 120;
}  // namespace board

// A rank's announcement of one collective.
struct Announcement {
  uint64_t number = 0, signature = 0, blob = 0, extra = 0;

  uint64_t check() const { return number ^ signature ^ blob ^ extra ^ board::MAGIC; }
};
static_assert(sizeof(Announcement) + 8 == board::ENTRY_SIZE, "the board's ENTRY");

inline uint64_t entry_of(uint64_t slot, uint64_t number) {
  return slot + board::SLOT_HEAD_SIZE + number % board::ENTRIES * board::ENTRY_SIZE;
}

// This rank's board. One thread at a time announces on a channel, since torch, too, numbers its collectives in one order.
class Board {
 public:
  explicit Board(char* map) : map_(map) {}

  void announce(uint64_t slot, const Announcement& announcement) {
    write(entry_of(slot, announcement.number), announcement, announcement.check());
    publish(word_at(map_, slot + board::LAST_AT), announcement.number);
  }

  void withdraw(uint64_t slot, uint64_t number) {
    const uint64_t at = entry_of(slot, number);
    if (__atomic_load_n(word_at(map_, at), __ATOMIC_RELAXED) != number) return;
    write(at, {}, 0);
    publish(word_at(map_, slot + board::LAST_AT), number - 1);
  }

  // Whether an announcement may still refer to a blob: half of the ring has not been written since.
  bool is_alive(uint64_t blob) const {
    const uint64_t head = __atomic_load_n(word_at(map_, board::HEAD), __ATOMIC_RELAXED);
    return blob + board::BLOBS_SIZE / 2 > head;
  }

 private:
  // The check is written last, and releases everything written before, including the blob. A reader whose words do not match the check
  // reads again.
  void write(uint64_t at, const Announcement& announcement, uint64_t check) {
    store_bytes(map_ + at, &announcement, sizeof announcement);
    publish(word_at(map_, at + sizeof announcement), check);
  }

  char* const map_;
};

// Another rank's board, read only. Nothing on it is trusted beyond its checks.
class PeerBoard {
 public:
  explicit PeerBoard(const char* map) : map_(const_cast<char*>(map)) {}

  // The offset of a channel's slot; 0 if this rank has not used the channel yet.
  uint64_t slot(uint64_t key) const {
    uint64_t used = word(board::USED);
    if (used > board::CHANNELS) used = board::CHANNELS;
    for (uint64_t at = board::HEADER_SIZE, i = 0; i < used; ++i, at += board::SLOT_SIZE)
      if (word(at) == key) return at;
    return 0;
  }

  // Get the signature of an announcement; false if it is not there yet, or has been overwritten.
  bool announced(uint64_t slot, uint64_t number, uint64_t& signature) const {
    const uint64_t at = entry_of(slot, number);
    const uint64_t check = word(at + sizeof(Announcement));
    const Announcement announcement{relaxed(at), relaxed(at + 8), relaxed(at + 16), relaxed(at + 24)};
    if (announcement.number != number || announcement.check() != check) return false;
    signature = announcement.signature;
    return true;
  }

  // Whether it has announced a later number of the same round, and so also this one.
  bool is_past(uint64_t slot, uint64_t number) const {
    const uint64_t last = word(slot + board::LAST_AT);
    return last > number && last >> board::ROUND_SHIFT == number >> board::ROUND_SHIFT;
  }

  uint64_t word(uint64_t offset) const { return observe(word_at(map_, offset)); }

 private:
  uint64_t relaxed(uint64_t offset) const { return __atomic_load_n(word_at(map_, offset), __ATOMIC_RELAXED); }

  char* const map_;
};

}  // namespace commlens
