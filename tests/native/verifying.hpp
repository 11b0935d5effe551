// Ranks that verify each other's collectives from several threads each, as strict verification does where it has plans: what all ask
// for alike is agreed upon, what one asks for otherwise is never, and what Python has found to fit together is.
#pragma once

#include "../../src/commlens/native/exchange.hpp"
#include "meeting.hpp"

namespace check {

constexpr uint64_t RANKS = 4, CHANNELS = 2;

enum class Kind { ALIKE, OTHERWISE, FITTING };

inline Kind kind_of(uint64_t n) { return n % 11 == 3 ? Kind::OTHERWISE : n % 11 == 5 ? Kind::FITTING : Kind::ALIKE; }

inline uint64_t signature_of(uint64_t rank, uint64_t n) {
  switch (kind_of(n)) {
    case Kind::ALIKE: return n % 3 + 100;
    case Kind::OTHERWISE: return rank == n % RANKS ? 200 : 201;
    default: return 300 + rank;
  }
}

// One rank. On its first channel everybody waits for all before issue; on the second for the next rank, and before the wait for all.
class Verified {
 public:
  Verified(const std::vector<char*>& boards, char* shared, uint64_t rank, uint64_t* asked)
      : shared_(shared), rank_(rank), asked_(asked), exchange_(boards[rank], shared, rank) {
    Words fitting;
    for (uint64_t peer = 0; peer < RANKS; ++peer) {
      members_.push_back(peer);
      fitting.insert(fitting.end(), {peer, 300 + peer});
      if (peer == rank) continue;
      exchange_.add_peer(peer, boards[peer]);
      others_.push_back(peer);
    }
    exchange_.agree(fitting);
    for (uint64_t channel = 0; channel < CHANNELS; ++channel)
      channels_.push_back(exchange_.channel(channel + 1, board::HEADER_SIZE + channel * board::SLOT_SIZE, members_, others_));
    catch_up();
  }

  void issue(uint64_t channel, uint64_t times) {
    for (uint64_t n = 1; n <= times; ++n) one(channel, n);
    left_.fetch_sub(1);
  }

  // What other threads of the rank do meanwhile: one makes a plan, groups change, somebody raises an alarm.
  void disturb() {
    while (left_.load() > 0) {
      usleep(500);
      exchange_.forget();
      exchange_.put(plans_[left_.load() % CHANNELS], 0, 0, std::make_shared<Plan>());
      __atomic_fetch_add(word_at(shared_, 8 * (left_.load() % 2 ? refusal_log::BOARDS_CREATED : refusal_log::COUNT)), 1, __ATOMIC_SEQ_CST);
    }
  }

 private:
  void catch_up() {
    exchange_.caught_up(true, observe(word_at(shared_, 8 * refusal_log::COUNT)), observe(word_at(shared_, 8 * refusal_log::BOARDS_CREATED)));
  }

  PlanPtr plan_of(uint64_t channel, uint64_t n) {
    for (;;) {
      if (PlanPtr plan = exchange_.plan(plans_[channel], signature_of(rank_, n), 0)) return plan;
      catch_up();
      auto made = std::make_shared<Plan>();
      made->channel = channels_[channel];
      made->generation = exchange_.generation();
      made->signature = signature_of(rank_, n);
      made->blob = 1;
      for (uint32_t i = 0; i < others_.size(); ++i) {
        if (channel == 0 || others_[i] == (rank_ + 1) % RANKS) made->at_issue.push_back(i);
        made->at_wait.push_back(i);
      }
      exchange_.put(plans_[channel], made->signature, 0, made);
    }
  }

  void one(uint64_t channel, uint64_t n) {
    const uint64_t thread = rank_ * CHANNELS + channel, began = now_ns();
    Announced op;
    Answer answer = exchange_.announce(op, plan_of(channel, n), n);
    for (bool at_issue = true; answer != Answer::AGREED;) {
      if (now_ns() - began > GIVEN_UP_NS) fail("rank %llu waits for ever for the others' %llu", wide(rank_), wide(n));
      if (answer == Answer::WAIT) {
        answer = exchange_.wait(op, at_issue, thread);
      } else if (answer == Answer::PENDING) {
        at_issue = false;
        answer = exchange_.before_wait(op);
      } else {  // an alarm, patience at its end, or a disagreement: Python would look around, and go on waiting
        const uint64_t alarms = observe(word_at(shared_, 8 * refusal_log::COUNT));
        catch_up();
        answer = exchange_.before_wait(op);
        if (answer == Answer::ASK_PYTHON && op.absent.empty() && alarms == observe(word_at(shared_, 8 * refusal_log::COUNT))) break;
        at_issue = false;
      }
    }
    if ((answer == Answer::AGREED) != (kind_of(n) != Kind::OTHERWISE))
      fail("rank %llu on channel %llu: %llu was %s", wide(rank_), wide(channel), wide(n), answer == Answer::AGREED ? "agreed upon" : "not agreed upon");
    if (answer == Answer::ASK_PYTHON) __atomic_fetch_add(asked_, 1, __ATOMIC_RELAXED);
  }

  char* const shared_;
  const uint64_t rank_;
  uint64_t* const asked_;
  Exchange exchange_;
  std::vector<uint64_t> members_, others_;
  std::vector<std::shared_ptr<VerifiedChannel>> channels_;
  Plans plans_[CHANNELS];
  std::atomic<uint64_t> left_{CHANNELS};
};

inline void verify_as(uint64_t rank, const std::vector<char*>& boards, char* shared, uint64_t* asked, uint64_t times) {
  Verified verified(boards, shared, rank, asked);
  std::vector<std::thread> threads;
  for (uint64_t channel = 0; channel < CHANNELS; ++channel) threads.emplace_back([&, channel] { verified.issue(channel, times); });
  threads.emplace_back([&] { verified.disturb(); });
  for (auto& thread : threads) thread.join();
}

inline void run_verifying(uint64_t times, bool processes) {
  char* shared = map_shared(4096);
  uint64_t* asked = word_at(map_shared(4096), 0);
  std::vector<char*> boards;
  for (uint64_t rank = 0; rank < RANKS; ++rank) {
    boards.push_back(map_shared(board::SIZE));
    for (uint64_t channel = 0; channel < CHANNELS; ++channel)
      *word_at(boards[rank], board::HEADER_SIZE + channel * board::SLOT_SIZE) = channel + 1;
    publish(word_at(boards[rank], board::USED), CHANNELS);
    publish(word_at(boards[rank], board::ACTIVE), 1);
  }
  run_ranks(RANKS, processes, [&](uint64_t rank) { verify_as(rank, boards, shared, asked, times); });
  uint64_t otherwise = 0;
  for (uint64_t n = 1; n <= times; ++n) otherwise += kind_of(n) == Kind::OTHERWISE;
  if (*asked != otherwise * RANKS * CHANNELS) fail("%llu disagreements were seen", wide(*asked));
  std::printf("%llu ranks as %s verified %llu collectives on %llu channels, and saw all %llu disagreements\n", wide(RANKS),
              processes ? "processes" : "threads", wide(times), wide(CHANNELS), wide(otherwise));
}

}  // namespace check
