// Strict verification where all agree: a collective is announced on this rank's board, the peers' announcements are compared with it,
// and waited for. Whatever is new, differs, or takes long is for Python: commlens/verification/verifier.py, which decides all of it, and says
// in a plan how the next one like it goes. No torch and no Python here: a driver tests it alone.
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

namespace alarms {  // words of commlens/blackbox/refusal_log.py
constexpr uint64_t COUNT = 0, CHANGES = 1;
}

struct Peer {
  Peer(uint64_t rank, const PeerBoard* board) : rank(rank), board(board) {}
  const uint64_t rank;
  const PeerBoard* const board;
  std::atomic<uint64_t> slot{0};  // of the channel on its board, once it has one
};

// A channel of this rank's board, or one direction between two of its ranks.
struct Watched {
  uint64_t key = 0, slot = 0;
  std::vector<uint64_t> members;  // global ranks
  std::vector<uint64_t> ranks;    // of the peers
  std::vector<std::unique_ptr<Peer>> peers;
};

using Indices = std::vector<uint32_t>;  // of peers

// How collectives are verified that ask for the same from the same line of the program.
struct Plan {
  std::shared_ptr<Watched> channel;
  uint64_t generation = 0, round = 0, signature = 0, blob = 0, extra = 0;
  Indices at_issue, at_wait;  // who is waited for before issue, and before a wait in the backend
};

using PlanPtr = std::shared_ptr<const Plan>;
using Plans = std::map<std::pair<uint64_t, int>, PlanPtr>;  // by stack and reduce op; under the exchange's mutex

// One that has been announced.
struct Announced {
  PlanPtr plan;
  uint64_t number = 0;  // with its round
  Indices absent;       // whose announcements have not been seen
  bool differs = false; // one that was seen asks for something else, which may be right: a root's partner does
};

enum class Answer {
  AGREED,   // with all
  PENDING,  // with those that are there; the others are compared before somebody waits for the op
  WAIT,     // for some of them, now
  ASK,      // Python
};

class Exchange {
 public:
  static constexpr uint64_t PATIENCE_NS = 50000000;  // then Python looks around whether the absent still live
  static constexpr uint64_t YIELDING_NS = 20000;  // before it sleeps: in a tight loop, ranks come within less
  static constexpr size_t PLANS = 1024, AGREED = 10000;

  // `board` is this rank's, `shared` the page that all ranks share.
  Exchange(char* board, char* shared, uint64_t rank) : board_(board), shared_(shared), bells_(shared, rank), rank_(rank) {}

  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  Board& board() { return board_; }
  Bells& bells() { return bells_; }

  // --- what Python says

  // Whether collectives are verified now; how many alarms and changes of boards it has seen to.
  void caught_up(bool active, uint64_t alarms, uint64_t changes) {
    if (alarms_.exchange(alarms) != alarms) forget();
    changes_.store(changes);
    active_.store(active);
  }

  // What plans were made of has changed: all are made anew.
  void forget() { generation_.fetch_add(1); }
  uint64_t generation() const { return generation_.load(); }

  void add_peer(uint64_t rank, const char* board) {
    std::lock_guard<std::mutex> lock(mutex_);
    boards_[rank] = std::make_unique<PeerBoard>(board);
  }

  std::shared_ptr<Watched> channel(uint64_t key, uint64_t slot, std::vector<uint64_t> members, const std::vector<uint64_t>& peers) {
    auto made = std::make_shared<Watched>();
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

  // These ranks' signatures differ, and fit together: rank, signature, rank, signature ...
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

  // Whether something has happened that Python has not seen to.
  bool has_news() const {
    const uint64_t changes = changes_.load(std::memory_order_relaxed);
    return is_alarmed() || (changes != ANY_CHANGES && shared(alarms::CHANGES) != changes);
  }

  bool is_alarmed() const { return shared(alarms::COUNT) != alarms_.load(std::memory_order_relaxed); }

  // The plan that was made for it; none where it is to be made.
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

  // Announces a collective, and compares it with those of the peers that are there.
  Answer announce(Announced& op, PlanPtr plan, uint64_t number) {
    op.plan = std::move(plan);
    const Watched& channel = *op.plan->channel;
    op.number = op.plan->round | number;
    board_.announce(channel.slot, {op.number, op.plan->signature, op.plan->blob, op.plan->extra});
    bells_.ring(channel.ranks);
    op.absent.clear();
    for (uint32_t i = 0; i < channel.peers.size(); ++i)
      if (!has_come(op, i)) op.absent.push_back(i);
    if (op.absent.empty()) return fits(op) ? Answer::AGREED : Answer::ASK;
    return is_awaited(op, op.plan->at_issue) ? Answer::WAIT : settled(op, true);
  }

  // Somebody is about to wait in the backend for it.
  Answer before_wait(Announced& op) {
    if (is_alarmed()) return Answer::ASK;
    look(op);
    return is_awaited(op, op.plan->at_wait) ? Answer::WAIT : settled(op, false);
  }

  // After WAIT. Whoever calls holds no lock, and not the GIL.
  Answer wait(Announced& op, bool at_issue, uint64_t thread) {
    const Indices& wanted = at_issue ? op.plan->at_issue : op.plan->at_wait;
    const uint64_t began = now_ns();
    const uint64_t until = began + PATIENCE_NS;
    do {
      sched_yield();  // to the peer, where it shares our processor
      look(op);
      if (is_alarmed()) return Answer::ASK;
      if (!is_awaited(op, wanted)) return settled(op, at_issue);
    } while (now_ns() < began + YIELDING_NS);
    Asleep asleep{bells_, thread};
    while (is_awaited(op, wanted)) {
      const uint32_t first = first_awaited(op, wanted);
      const uint64_t rank = op.plan->channel->peers[first]->rank;
      const uint64_t heard = bells_.listen(rank, thread);
      look(op);
      if (is_alarmed()) return Answer::ASK;
      if (first_awaited(op, wanted) != first) continue;
      const uint64_t at = now_ns();
      if (at >= until) return Answer::ASK;
      bells_.sleep(rank, heard, until - at);
      look(op);
    }
    if (is_alarmed()) return Answer::ASK;
    return settled(op, at_issue);
  }

  void withdraw(const Announced& op) { board_.withdraw(op.plan->channel->slot, op.number); }

  static constexpr uint64_t ANY_CHANGES = ~0ull;  // of boards: none is missed

 private:
  static constexpr uint32_t NONE = ~0u;

  struct Asleep {
    Bells& bells;
    const uint64_t thread;
    ~Asleep() { bells.awake(thread); }
  };

  uint64_t shared(uint64_t word) const { return observe(word_at(shared_, word * 8)); }

  // Whether nothing is to be waited for from a peer: it has announced this one, or a later one, or it does not announce at all.
  static bool has_come(Announced& op, uint32_t index) {
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

  static void look(Announced& op) {
    size_t kept = 0;
    for (const uint32_t index : op.absent)
      if (!has_come(op, index)) op.absent[kept++] = index;
    op.absent.resize(kept);
  }

  static uint32_t first_awaited(const Announced& op, const Indices& wanted) {
    for (const uint32_t index : op.absent)
      if (std::find(wanted.begin(), wanted.end(), index) != wanted.end()) return index;
    return NONE;
  }

  static bool is_awaited(const Announced& op, const Indices& wanted) { return first_awaited(op, wanted) != NONE; }

  // Nobody is waited for any more.
  Answer settled(Announced& op, bool at_issue) {
    if (!fits(op)) return Answer::ASK;
    if (op.absent.empty()) return Answer::AGREED;
    // What nobody waits for in Python is never looked at again: here is where it is seen that a rank has ended.
    if (at_issue && is_awaited(op, op.plan->at_wait))
      for (const uint32_t index : op.plan->at_wait)
        if (op.plan->channel->peers[index]->board->word(board::CLOSED)) return Answer::ASK;
    return Answer::PENDING;
  }

  // Whether those that are there have asked for the same, or Python found before that what they ask for fits together.
  bool fits(Announced& op) {
    if (!op.differs) return true;
    const Watched& channel = *op.plan->channel;
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
    if (!differs) return false;  // it was refused there meanwhile, and withdrawn
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
  std::atomic<uint64_t> alarms_{0}, changes_{0}, generation_{0};
  std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<PeerBoard>> boards_;
  WordTable<bool> agreed_;
};

}  // namespace commlens
