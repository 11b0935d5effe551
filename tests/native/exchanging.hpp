// Ranks that verify each other by plan, two threads each on two channels: all that fits is agreed to by all, and nothing else.
#pragma once

#include "../../src/commlens/native/exchange.hpp"
#include "meeting.hpp"

namespace check {

struct Exchanging {
  Meeting place;
  uint64_t ranks, times;
  uint64_t* const held = word_at(map_shared(4096), 0);  // collectives that were looked at by each thread, of all of them

  Exchanging(uint64_t ranks, uint64_t times) : place(ranks), ranks(ranks), times(times) {
    for (char* own : place.boards) publish(word_at(own, board::ACTIVE), 1);
  }

  void attend(uint64_t rank) {
    Exchange exchange(place.boards[rank], place.bells, rank);
    exchange.caught_up(true, 0, Exchange::ANY_CHANGES);
    for (uint64_t peer = 0; peer < ranks; ++peer)
      if (peer != rank) exchange.add_peer(peer, place.boards[peer]);
    std::vector<std::thread> threads;
    for (const uint64_t key : {MEETING_KEY, OTHER_KEY}) threads.emplace_back([&, key] { issue(exchange, rank, key); });
    for (auto& thread : threads) thread.join();
  }

 private:
  enum Kind { ALIKE, ASYNCHRONOUS, BY_ROOT, WRONG };

  static Kind kind(uint64_t number) { return number % 16 == 15 ? WRONG : static_cast<Kind>(number % 3); }

  // A root's differs from its partners'; of a wrong one, one rank's does.
  uint64_t signature(uint64_t rank, uint64_t number) const {
    const bool odd = kind(number) == BY_ROOT ? rank == 0 : kind(number) == WRONG && rank == number / 16 % ranks;
    return (number << 8 | odd) * 0x9E3779B97F4A7C15;
  }

  void issue(Exchange& exchange, uint64_t rank, uint64_t key) {
    std::vector<uint64_t> members, peers;
    Indices all;
    for (uint64_t peer = 0; peer < ranks; ++peer) {
      members.push_back(peer);
      if (peer == rank) continue;
      all.push_back(static_cast<uint32_t>(peers.size()));
      peers.push_back(peer);
    }
    const auto channel = exchange.channel(key, PeerBoard(place.boards[rank]).slot(key), members, peers);
    Plans plans;
    for (uint64_t number = 1; number <= times; ++number) {
      const Kind what = kind(number);
      auto made = std::make_shared<Plan>();
      made->channel = channel;
      made->generation = exchange.generation();
      made->signature = signature(rank, number);
      made->blob = 1;
      made->at_wait = all;
      if (what != ASYNCHRONOUS) made->at_issue = all;
      exchange.put(plans, number % 4, 0, made);
      if (what == BY_ROOT) {
        Words rows;
        for (uint64_t each = 0; each < ranks; ++each) rows.insert(rows.end(), {each, signature(each, number)});
        exchange.agree(std::move(rows));
      }
      Announced op;
      PlanPtr plan = exchange.plan(plans, number % 4, 0);
      if (!plan) fail("rank %llu has no plan", wide(rank));
      Answer answer = exchange.announce(op, std::move(plan), number);
      if (answer == Answer::PENDING) answer = exchange.before_wait(op);
      const uint64_t began = now_ns();
      while (!op.absent.empty()) {  // and again, where a rank takes long
        answer = exchange.wait(op, what != ASYNCHRONOUS, rank * 2 + (key == OTHER_KEY));
        if (now_ns() - began > GIVEN_UP_NS) fail("rank %llu waits for ever in %llu", wide(rank), wide(number));
      }
      // Who comes late may find that others have gone on and overwritten what was wrong: they have refused it by then.
      const bool agreed = answer == Answer::AGREED;
      if (what != WRONG && !agreed) fail("rank %llu does not agree to %llu", wide(rank), wide(number));
      if (what == WRONG && agreed && rank == number / 16 % ranks) fail("rank %llu agrees to what nobody else asked for", wide(rank));
      __atomic_fetch_add(held, 1, __ATOMIC_RELAXED);
    }
  }
};

inline void run_exchange(uint64_t ranks, uint64_t times, bool processes) {
  Exchanging job(ranks, times);
  run_ranks(ranks, processes, [&job](uint64_t rank) { job.attend(rank); });
  if (*job.held != 2 * ranks * times) fail("%llu collectives were looked at", wide(*job.held));
  std::printf("%llu ranks as %s, of two threads each, verified %llu collectives\n", wide(ranks), processes ? "processes" : "threads", wide(2 * times));
}

}  // namespace check
