// Ranks that announce on their boards, wake each other by their bells and wait until they have read what the others said: as threads
// of one process, where ThreadSanitizer sees them, or as processes.
#pragma once

#include <sys/wait.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "../../src/commlens/native/bells.hpp"
#include "../../src/commlens/native/board.hpp"
#include "mapped.hpp"

namespace check {

constexpr uint64_t MEETING_KEY = 7, OTHER_KEY = 11, GIVEN_UP_NS = 60000000000;

// What a rank says as `number`: another signature in each round, as of an op that was refused and is tried again.
inline Announcement said_by(uint64_t rank, uint64_t number) { return {number, (number << 8 | rank) * 0x9E3779B97F4A7C15, number * 8 + 1, rank + 1}; }

struct Meeting {
  char* const bells;
  std::vector<char*> boards;
  uint64_t* const slept;
  uint64_t* const counts;  // of each rank: meetings held

  explicit Meeting(uint64_t ranks) : bells(map_shared(4096)), slept(word_at(map_shared(4096), 0)), counts(word_at(map_shared(4096), 0)) {
    for (uint64_t rank = 0; rank < ranks; ++rank) {
      boards.push_back(map_shared(board::SIZE));
      *word_at(boards[rank], board::HEADER_SIZE) = OTHER_KEY;  // as Python's add_channel does it
      *word_at(boards[rank], board::HEADER_SIZE + board::SLOT_SIZE) = MEETING_KEY;
      publish(word_at(boards[rank], board::USED), 2);
    }
  }

  // `rank` takes part in so many collectives.
  void attend(uint64_t rank, uint64_t times) {
    Board own(boards[rank]);
    Bells bell(bells, rank);
    std::vector<PeerBoard> peers;
    std::vector<uint64_t> others;
    for (uint64_t peer = 0; peer < boards.size(); ++peer) {
      peers.emplace_back(boards[peer]);
      if (peer != rank) others.push_back(peer);
    }
    const uint64_t slot = peers[rank].slot(MEETING_KEY);
    if (!slot) fail("rank %llu finds its channel nowhere", wide(rank));
    for (uint64_t n = 1; n <= times; ++n) {
      const uint64_t round = n / 1000;  // more than a board's 16 entries, so that none is met again
      const uint64_t number = round << board::ROUND_SHIFT | n;
      if (n % 7 == rank % 7) {  // refused, unsaid, and tried again
        own.announce(slot, {number, 1, 2, 3});
        own.withdraw(slot, number);
      }
      own.announce(slot, said_by(rank, number));
      bell.ring(others);
      for (const uint64_t peer : others) meet(bell, peers[peer], rank, peer, number);
      publish(counts + rank, n);
    }
  }

 private:
  void meet(Bells& bell, const PeerBoard& board, uint64_t rank, uint64_t peer, uint64_t number) {
    const uint64_t began = now_ns();
    while (!has_said(board, peer, number)) {
      const uint64_t heard = bell.listen(peer, rank);
      if (!has_said(board, peer, number)) {
        bell.sleep(peer, heard, bells::LONGEST_NS);
        __atomic_fetch_add(slept, 1, __ATOMIC_RELAXED);
      }
      bell.awake(rank);
      if (now_ns() - began > GIVEN_UP_NS) fail("rank %llu waits for ever for number %llx of rank %llu", wide(rank), wide(number), wide(peer));
    }
  }

  static bool has_said(const PeerBoard& board, uint64_t peer, uint64_t number) {
    const uint64_t slot = board.slot(MEETING_KEY);
    uint64_t signature = 0;
    if (!board.announced(slot, number, signature)) return board.is_past(slot, number);
    // What is unsaid later may be read, like all that was said.
    if (signature != said_by(peer, number).signature && signature != 1) fail("rank %llu is read to have said %llx", wide(peer), wide(signature));
    return signature != 1;
  }
};

// Each rank in a thread, or in a process, of its own.
template <class Attend>
void run_ranks(uint64_t ranks, bool processes, Attend attend) {
  std::fflush(stdout);
  std::vector<std::thread> threads;
  std::vector<pid_t> children;
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    if (!processes) {
      threads.emplace_back([&attend, rank] { attend(rank); });
    } else if (const pid_t child = fork()) {
      children.push_back(child);
    } else {
      attend(rank);
      _exit(0);
    }
  }
  for (auto& thread : threads) thread.join();
  for (const pid_t child : children) {
    int status = 0;
    if (waitpid(child, &status, 0) != child || status) fail("a rank ended with %x", static_cast<unsigned>(status));
  }
}

// How long `times` collectives of `ranks` take is up to the machine.
inline void run_meeting(uint64_t ranks, uint64_t times, bool processes) {
  Meeting meeting(ranks);
  run_ranks(ranks, processes, [&](uint64_t rank) { meeting.attend(rank, times); });
  for (uint64_t rank = 0; rank < ranks; ++rank)
    if (observe(meeting.counts + rank) != times) fail("rank %llu took part in %llu collectives", wide(rank), wide(observe(meeting.counts + rank)));
  std::printf("%llu ranks as %s met %llu times, and slept %llu times until a bell rang\n", wide(ranks), processes ? "processes" : "threads",
              wide(times), wide(*meeting.slept));
}

}  // namespace check
