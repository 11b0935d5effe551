// The watchdog of nccl2: a thread without a name that looks once a second, completion and abort hooks, and the end of the process.
#pragma once

#include "watchdog.hpp"

namespace nccl_like {

class Watchdog2 : public Watcher {
 public:
  Watchdog2(std::shared_ptr<GroupFacts> group, bool blocking_wait, std::function<void()> abort_communicators)
      : group_(std::move(group)), abort_communicators_(std::move(abort_communicators)) {
    error_handling_ = c10d::getCvarInt({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, 3);
    if (!blocking_wait) thread_ = std::thread([this] { watch(); });
  }

  ~Watchdog2() override { stop(); }

  void enqueue(const OperationPtr& operation) override {
    std::lock_guard<std::mutex> lock(mutex_);
    operations_.push_back(operation);
  }

  // nccl2 retires what is complete before each collective, too, and raises there if an operation before it failed.
  void before_a_collective() override {
    if (Device::get().is_capturing()) return;
    look();
    if (state_.load() == State::NORMAL) return;
    const bool timed_out = state_.load() == State::TIMEOUT;
    if (!timed_out && cleaned_.load()) C10_THROW_ERROR(Error, "NCCL communicator was aborted after a previous error");
    fail(timed_out ? "timeout - collective operation timed out" : "error - NCCL Async Error: remote process exited or there was a network error");
    C10_THROW_ERROR(Error, timed_out ? "NCCL operation timed out" : "NCCL Async Error: remote process exited or there was a network error");
  }

  void terminate() override {
    {
      std::lock_guard<std::mutex> lock(wake_mutex_);
      terminates_ = true;
    }
    wake_.notify_all();
  }

  void stop() override {
    terminate();
    if (thread_.joinable()) thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
    std::lock_guard<std::mutex> lock(mutex_);
    operations_.clear();
  }

 private:
  enum class State { NORMAL, TIMEOUT, ERROR };

  void watch() {
    is_internal_thread = true;
    while (true) {
      {
        std::unique_lock<std::mutex> lock(wake_mutex_);
        if (wake_.wait_for(lock, std::chrono::seconds(1), [this] { return terminates_; })) return;
      }
      if (watchdogs_are_stuck.load()) continue;
      look();
      if (state_.load() == State::NORMAL) continue;
      fail(state_.load() == State::TIMEOUT ? "timeout - timeout watchdog detected operation timeout"
                                           : "error - timeout watchdog detected operation error");
      return;
    }
  }

  // Retire what is complete, oldest first.
  void look() {
    const Internally ours;
    std::vector<OperationPtr> complete;
    State found = State::NORMAL;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (!operations_.empty()) {
        const auto& operation = operations_.front();
        if (!operation->failure() && operation->end->query() && !operation->kernel->communicator->aborted.load()) {
          operation->mark(c10d::WorkResult::SUCCESS);
          complete.push_back(operation);
          operations_.pop_front();
          continue;
        }
        if (peer_death_is_an_error.load() && !operation->failure() && operation->kernel->communicator->mesh->lost_a_peer()) {
          log_tc("ProcessGroupNCCLUtils.cpp", group_->rank, group_->uid,
                 c10::str("nccl hit async error on rank ", group_->rank, ": remote process exited or there was a network error"));
          operation->fail("NCCL operation failed", c10d::WorkResult::COMM_ERROR);
          found = State::ERROR;
        } else if (operation->failure() || operation->has_timed_out()) {
          found = operation->timed_out.load() ? State::TIMEOUT : State::ERROR;
        }
        break;
      }
    }
    for (const auto& operation : complete) group_->completed(*operation);
    if (found == State::NORMAL || terminated()) return;
    State before = State::NORMAL;
    if (state_.compare_exchange_strong(before, found)) group_->aborts();
  }

  bool terminated() {
    std::lock_guard<std::mutex> lock(wake_mutex_);
    return terminates_;
  }

  void fail(const std::string& reason) {
    if (error_handling_ == 1 || error_handling_ == 2) {
      terminate();
      abort_communicators_();
      cleaned_.store(true);
    }
    if (error_handling_ != 1 && error_handling_ != 3) return;
    log_tc("ProcessGroupNCCL.cpp", group_->rank, group_->uid, c10::str("Aborting process on rank ", group_->rank, " due to ", reason));
    group_->aborts();
    std::abort();
  }

  const std::shared_ptr<GroupFacts> group_;
  const std::function<void()> abort_communicators_;
  int error_handling_ = 3;
  std::mutex mutex_, wake_mutex_;
  std::condition_variable wake_;
  bool terminates_ = false;
  std::list<OperationPtr> operations_;
  std::atomic<State> state_{State::NORMAL};
  std::atomic<bool> cleaned_{false};
  std::thread thread_;
};

}  // namespace nccl_like
