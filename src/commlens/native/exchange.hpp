// Strict verification while all ranks agree: announces a collective on this rank's board, compares it with the peers' announcements, and
// waits for them. commlens/verification/verifier.py, in Python, decides everything that is new, differs or takes long, and makes a plan
// for the next collective like it. Uses neither torch nor Python, so that a driver can test it alone.
#pragma once

#include <sched.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bells.hpp"
#include "board.hpp"
#include "clock.hpp"
#include "words.hpp"

namespace commlens {

namespace refusal_log {  // commlens/boards/refusal_log.py: words of the page that all ranks share
constexpr uint64_t COUNT = 0, BOARDS_CREATED = 1;
}

struct Peer {
  Peer(uint64_t rank, const PeerBoard* board) : rank(rank), board(board) {}
  const uint64_t rank;
  const PeerBoard* const board;
  std::atomic<uint64_t> slot{0};  // of the channel on its board; 0 until it has one
};

// A channel of this rank's board, or one direction between two of its ranks.
struct VerifiedChannel {
  uint64_t key = 0, slot = 0;
  std::vector<uint64_t> members;  // global ranks
  std::vector<uint64_t> ranks;    // of the peers
  std::vector<std::unique_ptr<Peer>> peers;
};

using Indices = std::vector<uint32_t>;  // of peers

// How to verify collectives with the same arguments from the same line of the program.
struct Plan {
  std::shared_ptr<VerifiedChannel> channel;
  uint64_t generation = 0, round = 0, signature = 0, blob = 0, extra = 0;
  Indices at_issue, at_wait;  // the peers to wait for before issue, and before a wait in the backend
};

using PlanPtr = std::shared_ptr<const Plan>;
using Plans = std::map<std::pair<uint64_t, int>, PlanPtr>;  // by stack and reduce op; under the exchange's mutex

// A collective that has been announced.
struct Announced {
  PlanPtr plan;
  uint64_t number = 0;  // with its round
  Indices absent;       // peers whose announcements have not been seen
  bool differs = false;  // a peer's signature differs, which may be legal: a root's differs from the others'
};

enum class Answer {
  AGREED,      // with all peers
  PENDING,     // with the peers so far; the others are compared before a thread waits for the op
  WAIT,        // for some peers, now
  ASK_PYTHON,  // Python decides
};

class Exchange {
 public:
  static constexpr uint64_t PATIENCE_NS = 50000000;  // then Python checks whether the absent peers are alive
  static constexpr uint64_t YIELDING_NS = 20000;  // then it sleeps; in a tight loop, the peers arrive within that time
  static constexpr size_t PLANS = 1024, AGREED = 10000;

  // `board` is this rank's, `shared` the page that all ranks share.
  Exchange(char* board, char* shared, uint64_t rank) : board_(board), shared_(shared), bells_(shared, rank), rank_(rank) {}

  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  Board& board() { return board_; }
  Bells& bells() { return bells_; }

  // --- called from Python

  // Set whether collectives are verified now, and how many refusals and new boards Python has handled.
  void caught_up(bool active, uint64_t refusals, uint64_t boards) {
    if (refusals_seen_.exchange(refusals) != refusals) forget();
    boards_seen_.store(boards);
    active_.store(active);
  }

  // Compare only each collective whose number is a multiple of this; 0: all of them.
  void sample(uint64_t every) { sample_every_.store(every); }

  // Discard all plans: what they were made from has changed.
  void forget() { generation_.fetch_add(1); }
  uint64_t generation() const { return generation_.load(); }

  void add_peer(uint64_t rank, const char* board) {
    std::lock_guard<std::mutex> lock(mutex_);
    boards_[rank] = std::make_unique<PeerBoard>(board);
  }

  std::shared_ptr<VerifiedChannel> channel(uint64_t key, uint64_t slot, std::vector<uint64_t> members, const std::vector<uint64_t>& peers) {
    auto made = std::make_shared<VerifiedChannel>();
    made->key = key;
    made->slot = slot;
    made->members = std::move(members);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const uint64_t rank : peers) {
      const auto found = boards_.find(rank);
      if (found == boards_.end()) continue;
      made->ranks.push_back(rank);
      made->peers.push_back(std::make_unique<Peer>(rank, found->second.get()));
    }
    return made;
  }

  void put(Plans& plans, uint64_t stack, int code, PlanPtr plan) {
    Plans old;
    std::lock_guard<std::mutex> lock(mutex_);
    if (plans.size() >= PLANS) plans.swap(old);
    plans[{stack, code}] = std::move(plan);
  }

  // The signatures of these ranks differ but are compatible: rank, signature, rank, signature ...
  void agree(Words rows) {
    WordTable<bool> old;
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t hash = hash_of(rows);
    if (agreed_.find(rows, hash)) return;
    if (agreed_.size() >= AGREED) agreed_.swap(old);
    agreed_.put(std::move(rows), hash, true);
  }

  // --- the hot path

  bool is_active() const { return active_.load(std::memory_order_relaxed); }

  // Whether there is a refusal or a new board that Python has not handled.
  bool has_news() const {
    const uint64_t boards = boards_seen_.load(std::memory_order_relaxed);
    return has_unseen_refusal() || (boards != ALL_BOARDS_SEEN && shared(refusal_log::BOARDS_CREATED) != boards);
  }

  bool has_unseen_refusal() const { return shared(refusal_log::COUNT) != refusals_seen_.load(std::memory_order_relaxed); }

  // The valid plan for this stack and reduce op; null if there is none.
  PlanPtr plan(Plans& plans, uint64_t stack, int code) {
    if (has_news()) return nullptr;
    PlanPtr plan;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = plans.find({stack, code});
      if (found == plans.end()) return nullptr;
      plan = found->second;
    }
    return plan->generation == generation() && board_.is_alive(plan->blob) ? plan : nullptr;
  }

  // Announces a collective, and compares it with the announcements of the peers so far.
  Answer announce(Announced& op, PlanPtr plan, uint64_t number) {
    op.plan = std::move(plan);
    const VerifiedChannel& channel = *op.plan->channel;
    op.number = op.plan->round | number;
    board_.announce(channel.slot, {op.number, op.plan->signature, op.plan->blob, op.plan->extra});
    op.absent.clear();
    op.differs = false;
    const uint64_t every = sample_every_.load(std::memory_order_relaxed);
    if (every && number % every) return Answer::AGREED;  // not compared; a peer that compares it looks again without being woken
    bells_.ring(channel.ranks);
    for (uint32_t i = 0; i < channel.peers.size(); ++i)
      if (!has_arrived(op, i)) op.absent.push_back(i);
    if (op.absent.empty()) return is_compatible(op) ? Answer::AGREED : Answer::ASK_PYTHON;
    return is_awaited(op, op.plan->at_issue) ? Answer::WAIT : conclude(op, true);
  }

  // Before a thread waits for the op in the backend.
  Answer before_wait(Announced& op) {
    if (has_unseen_refusal()) return Answer::ASK_PYTHON;
    compare(op);
    return is_awaited(op, op.plan->at_wait) ? Answer::WAIT : conclude(op, false);
  }

  // Call this after WAIT, without a lock and without the GIL.
  Answer wait(Announced& op, bool at_issue, uint64_t thread) {
    const Indices& wanted = at_issue ? op.plan->at_issue : op.plan->at_wait;
    const uint64_t began = now_ns();
    const uint64_t until = began + PATIENCE_NS;
    do {
      sched_yield();  // to the peer, which may share our processor
      compare(op);
      if (has_unseen_refusal()) return Answer::ASK_PYTHON;
      if (!is_awaited(op, wanted)) return conclude(op, at_issue);
    } while (now_ns() < began + YIELDING_NS);
    SleepGuard asleep{bells_, thread};
    while (is_awaited(op, wanted)) {
      const uint32_t first = first_awaited(op, wanted);
      const uint64_t rank = op.plan->channel->peers[first]->rank;
      const uint64_t heard = bells_.listen(rank, thread);
      compare(op);
      if (has_unseen_refusal()) return Answer::ASK_PYTHON;
      if (first_awaited(op, wanted) != first) continue;
      const uint64_t at = now_ns();
      if (at >= until) return Answer::ASK_PYTHON;
      bells_.sleep(rank, heard, until - at);
      compare(op);
    }
    if (has_unseen_refusal()) return Answer::ASK_PYTHON;
    return conclude(op, at_issue);
  }

  void withdraw(const Announced& op) { board_.withdraw(op.plan->channel->slot, op.number); }

  static constexpr uint64_t ALL_BOARDS_SEEN = ~0ull;  // no peer lacks a board

 private:
  static constexpr uint32_t NONE = ~0u;

  struct SleepGuard {
    Bells& bells;
    const uint64_t thread;
    ~SleepGuard() { bells.awake(thread); }
  };

  uint64_t shared(uint64_t word) const { return observe(word_at(shared_, word * 8)); }

  // Whether a peer need not be waited for: it has announced this op or a later one, or does not verify.
  static bool has_arrived(Announced& op, uint32_t index) {
    Peer& peer = *op.plan->channel->peers[index];
    uint64_t slot = peer.slot.load(std::memory_order_relaxed);
    if (!slot && (slot = peer.board->slot(op.plan->channel->key))) peer.slot.store(slot, std::memory_order_relaxed);
    uint64_t signature;
    if (slot && peer.board->announced(slot, op.number, signature)) {
      if (signature != op.plan->signature) op.differs = true;
      return true;
    }
    return (slot && peer.board->is_past(slot, op.number)) || !peer.board->word(board::ACTIVE);
  }

  static void compare(Announced& op) {
    size_t kept = 0;
    for (const uint32_t index : op.absent)
      if (!has_arrived(op, index)) op.absent[kept++] = index;
    op.absent.resize(kept);
  }

  static uint32_t first_awaited(const Announced& op, const Indices& wanted) {
    for (const uint32_t index : op.absent)
      if (std::find(wanted.begin(), wanted.end(), index) != wanted.end()) return index;
    return NONE;
  }

  static bool is_awaited(const Announced& op, const Indices& wanted) { return first_awaited(op, wanted) != NONE; }

  // The answer once no peer needs to be waited for.
  Answer conclude(Announced& op, bool at_issue) {
    if (!is_compatible(op)) return Answer::ASK_PYTHON;
    if (op.absent.empty()) return Answer::AGREED;
    // If no thread waits for the op in Python, nothing checks it again, so check here whether a needed rank has ended.
    if (at_issue && is_awaited(op, op.plan->at_wait))
      for (const uint32_t index : op.plan->at_wait)
        if (op.plan->channel->peers[index]->board->word(board::CLOSED)) return Answer::ASK_PYTHON;
    return Answer::PENDING;
  }

  // Whether the peers so far have the same signature, or one that Python has found compatible.
  bool is_compatible(Announced& op) {
    if (!op.differs) return true;
    const VerifiedChannel& channel = *op.plan->channel;
    Words rows;
    bool differs = false;
    for (const uint64_t rank : channel.members) {
      if (rank == rank_) {
        rows.insert(rows.end(), {rank, op.plan->signature});
        continue;
      }
      uint64_t signature;
      for (const auto& peer : channel.peers)
        if (peer->rank == rank && peer->slot && peer->board->announced(peer->slot, op.number, signature)) {
          rows.insert(rows.end(), {rank, signature});
          differs = differs || signature != op.plan->signature;
        }
    }
    if (!differs) return false;  // the peer has refused and withdrawn it meanwhile
    std::lock_guard<std::mutex> lock(mutex_);
    if (!agreed_.find(rows, hash_of(rows))) return false;
    op.differs = false;
    return true;
  }

  Board board_;
  char* const shared_;
  Bells bells_;
  const uint64_t rank_;
  std::atomic<bool> active_{false};
  std::atomic<uint64_t> refusals_seen_{0}, boards_seen_{0}, generation_{0}, sample_every_{0};
  std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<PeerBoard>> boards_;
  WordTable<bool> agreed_;
};

}  // namespace commlens
