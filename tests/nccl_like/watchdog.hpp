// The threads beside a group: the watchdog, which removes what is complete and ends the process at a timeout, and the heartbeat monitor,
// which writes the Flight Recorder's dump and ends a process whose watchdog is stuck.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <future>
#include <list>

#include "work.hpp"

namespace nccl_like {

inline std::atomic<bool> watchdogs_are_stuck{false};  // a test's setting
inline std::atomic<bool> should_dump{false};          // of the process
inline std::atomic<bool> peer_death_is_an_error{false};

constexpr const char* DUMP_KEY = "exception_dump";

struct GroupFacts {
  size_t local_id = 0;
  int rank = 0, size = 0, global_rank = 0;
  std::string uid, description;
  c10::intrusive_ptr<c10d::Store> global_store;
  Status status = std::make_shared<c10d::ProcessGroupStatus>();

#ifdef NCCL_LIKE_HOOKS
  std::mutex hooks_mutex;
  std::map<int64_t, c10d::CompletionHook> hooks;
  std::map<int64_t, c10d::AbortHook> abort_hooks;

  // Called without the lock: who holds a lock of its own may register or unregister meanwhile.
  void completed(const Operation& operation) {
    std::optional<float> took;
    if (operation.timing) took = std::chrono::duration<float, std::milli>(operation.end->at() - operation.start->at()).count();
    for (const auto& hook : all_of(hooks)) hook.second({operation.key, took});
  }
  void aborts() {
    for (const auto& hook : all_of(abort_hooks)) hook.second();
  }
  template <typename Hooks>
  Hooks all_of(const Hooks& some) {
    std::lock_guard<std::mutex> lock(hooks_mutex);
    return some;
  }
#else
  void completed(const Operation&) {}
  void aborts() {}
#endif

  std::string prefix() const {
    const bool described = !description.empty() && description != "undefined";
    return c10::str("[PG ID ", local_id, " PG GUID ", uid, described ? "(" + description + ")" : "", " Rank ", rank, "] ");
  }
};

// What follows the operations of a group.
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void enqueue(const OperationPtr& operation) = 0;
  virtual void before_a_collective() {}  // in the thread that issues it
  virtual void terminate() = 0;
  virtual void stop() = 0;
};

class Watchdog : public Watcher {
 public:
  explicit Watchdog(std::shared_ptr<GroupFacts> group) : group_(std::move(group)) {
    heartbeat_limit_s_ = c10d::getCvarInt({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"}, 480);
    dump_wait_ms_ = c10d::getCvarInt({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}, 15000);
    check_ms_ = c10d::getCvarInt({"TORCH_NCCL_COORD_CHECK_MILSEC"}, 1000);
    dumps_ = c10d::getCvarBool({"TORCH_NCCL_DUMP_ON_TIMEOUT"}, true);
    monitors_ = c10d::getCvarBool({"TORCH_NCCL_ENABLE_MONITORING"}, true);
    error_handling_ = c10d::getCvarInt({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, 3);
    open_pipe();
    watchdog_ = std::thread([this] { watch_and_report(); });
    monitor_ = std::thread([this] { monitor(); });
  }

  ~Watchdog() override {
    stop();
    if (pipe_ >= 0) close(pipe_);
  }

  void enqueue(const OperationPtr& operation) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (terminates_.load()) return;
    operations_.push_back(operation);
    auto& status = *group_->status;
    status.lastEnqueuedSeq = static_cast<int64_t>(operation->seq);
    status.lastEnqueuedWorkName = c10d::opTypeToString(operation->type);
    status.lastEnqueuedNumelIn = operation->numel_in;
    status.lastEnqueuedNumelOut = operation->numel_out;
  }

  void terminate() override {
    terminates_.store(true);
    wake_.notify_all();
  }

  // Ends both threads. The operations of the list are complete or aborted.
  void stop() override {
    terminate();
    if (watchdog_.joinable()) watchdog_.join();
    {
      std::lock_guard<std::mutex> lock(monitor_mutex_);
      monitor_ends_ = true;
    }
    monitor_wakes_.notify_all();
    if (monitor_.joinable()) monitor_.join();
    const bool was_internal = std::exchange(is_internal_thread, true);
    for (const auto& operation : operations_) retire(operation->entry);
    operations_.clear();
    is_internal_thread = was_internal;
  }

 private:
  void watch_and_report() {
    c10::setThreadName("pt_nccl_watchdg");
    is_internal_thread = true;
    try {
      watch();
    } catch (const std::exception& error) {
      const auto message = c10::str(group_->prefix(), "Process group watchdog thread terminated with exception: ", error.what());
      log_error(message);
      throw C10_BUILD_ERROR(DistBackendError, message);  // std::terminate, and SIGABRT
    }
  }

  void watch() {
    const auto give_up = [this] { return terminates_.load() && Clock::now() > give_up_at(); };
    bool done = false;
    while (!(done && terminates_.load()) && !give_up()) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait_for(lock, Milliseconds(100), [this] { return terminates_.load(); });
      while (watchdogs_are_stuck.load() && !terminates_.load()) {
        lock.unlock();
        std::this_thread::sleep_for(Milliseconds(20));
        lock.lock();
      }
      heartbeat_.fetch_add(1);
      for (auto at = operations_.begin(); at != operations_.end();) {
        const OperationPtr operation = *at;
        if (look_at(operation, lock)) at = operations_.erase(at);
        else ++at;
        heartbeat_.fetch_add(1);
      }
      done = operations_.empty();
      if (terminates_.load() && !done) {
        lock.unlock();
        std::this_thread::sleep_for(Milliseconds(2));
      }
    }
  }

  Clock::time_point give_up_at() {
    if (!terminating_since_) terminating_since_ = Clock::now();
    return *terminating_since_ + std::chrono::seconds(5);
  }

  // Returns whether it is complete.
  bool look_at(const OperationPtr& operation, std::unique_lock<std::mutex>& lock) {
    if (!terminates_.load() && peer_death_is_an_error.load() && operation->kernel->communicator->mesh->lost_a_peer() &&
        !operation->end->query() && !operation->failure()) {
      const auto message = c10::str("NCCL error: remote process exited or there was a network error. ", operation->text());
      log_error(c10::str(operation->prefix(), "Collective ", operation->text(), " raised the following async exception: ", message));
      operation->fail(message, c10d::WorkResult::COMM_ERROR);
    }
    if (operation->failure() || (!terminates_.load() && operation->has_timed_out())) {
      fail(operation, lock);
      return true;
    }
    auto& status = *group_->status;
    if (operation->timing && status.lastStartedSeq < static_cast<int64_t>(operation->seq) && operation->start->query()) {
      status.lastStartedSeq = static_cast<int64_t>(operation->seq);
      status.lastStartedWorkName = c10d::opTypeToString(operation->type);
      status.lastStartedNumelIn = operation->numel_in;
      status.lastStartedNumelOut = operation->numel_out;
    }
    if (!operation->end->query()) return false;
    operation->mark(c10d::WorkResult::SUCCESS);
    status.lastCompletedSeq = static_cast<int64_t>(operation->seq);
    status.lastCompletedWorkName = c10d::opTypeToString(operation->type);
    status.lastCompletedNumelIn = operation->numel_in;
    status.lastCompletedNumelOut = operation->numel_out;
    retire(operation->entry);
    return true;
  }

  // The signal to dump first, then time for all ranks to follow it, then the end of the process.
  void fail(const OperationPtr& operation, std::unique_lock<std::mutex>& lock) {
    log_error(c10::str(
        group_->prefix(), " failure detected by watchdog at work sequence id: ", operation->seq,
        " PG status: last enqueued work: ", group_->status->lastEnqueuedSeq, ", last completed work: ", group_->status->lastCompletedSeq));
    print_traceback(*operation);
    signal_dump();
    lock.unlock();
    std::this_thread::sleep_for(Milliseconds(4 * dump_wait_ms_));
    lock.lock();
    if (error_handling_ == 1 || error_handling_ == 2) operation->kernel->communicator->aborted.store(true);
    if (error_handling_ == 1 || error_handling_ == 3) operation->take_the_process_down();
    retire(operation->entry);
  }

  void print_traceback(const Operation& operation) {
    // Symbols need the GIL, which the program may hold for ever.
    auto text = std::make_shared<std::promise<std::string>>();
    auto future = text->get_future();
    std::thread([text, entry = operation.entry] { text->set_value(traceback(entry)); }).detach();
    std::string found;
    if (future.wait_for(std::chrono::seconds(8)) == std::future_status::ready) found = future.get();
    log_error(
        !found.empty() ? "Stack trace of the failed collective: \n" + found
                       : "Stack trace of the failed collective not found, potentially because FlightRecorder is disabled. You can enable it "
                         "by setting TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value.");
  }

  void signal_dump() {
    try {
      const int rank = group_->global_rank;
      const auto* bytes = reinterpret_cast<const uint8_t*>(&rank);
      group_->global_store->set(DUMP_KEY, std::vector<uint8_t>(bytes, bytes + sizeof rank));
    } catch (const std::exception& error) {
      log_error(c10::str(group_->prefix(), "Failed to broadcast signal ", DUMP_KEY, " through TCPStore. Error: ", error.what()));
    }
    if (!should_dump.exchange(true)) log_error(group_->prefix() + "First PG on this rank to signal dumping.");
  }

  // --- the monitor

  bool sleep_monitor(Milliseconds time) {
    std::unique_lock<std::mutex> lock(monitor_mutex_);
    return monitor_wakes_.wait_for(lock, time, [this] { return monitor_ends_; });
  }

  void monitor() {
    c10::setThreadName("pt_nccl_heartbt");
    is_internal_thread = true;
    const bool answers_signals = dumps_ && group_->local_id == 0;
    auto checked_store = Clock::now(), checked_heartbeat = Clock::now();
    uint64_t heartbeat = 0;
    std::string message, reason;
    while (message.empty()) {
      if (sleep_monitor(Milliseconds(answers_signals ? check_ms_ : heartbeat_limit_s_ * 1000))) return;
      if (answers_signals && should_dump.load()) {
        message = why_dump("this local rank");
        reason = "collective timeout or exception";
      } else if (answers_signals && Clock::now() - checked_store >= Milliseconds(check_ms_)) {
        checked_store = Clock::now();
        const int from = signalled_by();
        if (from >= 0) {
          log_error(group_->prefix() + "Observed flight recorder dump signal from another rank via TCPStore.");
          should_dump.store(true);
          message = why_dump(c10::str(" rank ", from));
          reason = "collective timeout or exception";
        }
      }
      if (message.empty() && Clock::now() - checked_heartbeat >= std::chrono::seconds(heartbeat_limit_s_)) {
        checked_heartbeat = Clock::now();
        const uint64_t now = heartbeat_.load();
        if (now == heartbeat) {
          should_dump.store(true);
          message = c10::str(
              group_->prefix(), "ProcessGroupNCCL's watchdog got stuck for ", heartbeat_limit_s_,
              " seconds without making progress in monitoring enqueued collectives. ");
          reason = "ProcessGroupNCCL watchdog hang";
        }
        heartbeat = now;
      }
      if (message.empty() && pipe_asks()) std::thread([] { write_dump_of_process(true); }).detach();
    }
    log_error(message);
    if (answers_signals) dump_in_time();
    if (sleep_monitor(std::chrono::seconds(heartbeat_limit_s_))) return;
    if (monitors_) {
      log_error(c10::str(group_->prefix(), "Terminating the process after attempting to dump debug info, due to ", reason, "."));
      std::abort();
    }
  }

  std::string why_dump(const std::string& who) const {
    return c10::str(
        group_->prefix(), "Received a dump signal due to a collective timeout from ", who,
        " and we will try our best to dump the debug info. Last enqueued NCCL work: ", group_->status->lastEnqueuedSeq,
        ", last completed NCCL work: ", group_->status->lastCompletedSeq,
        ".This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks, the order of collectives is not "
        "same for all ranks or the scheduled collective, for some reason, didn't run. Additionally, this can be caused by GIL deadlock or other "
        "reasons such as network errors or bugs in the communications library (e.g. NCCL), etc. ");
  }

  int signalled_by() const {
    int rank = -1;
    try {
      if (!group_->global_store->check({DUMP_KEY})) return -1;
      const auto value = group_->global_store->get(DUMP_KEY);
      if (value.size() == sizeof rank) std::memcpy(&rank, value.data(), sizeof rank);
    } catch (const std::exception&) {  // the store is gone
    }
    return rank;
  }

  static void write_dump_of_process(bool stacks) {
#ifdef NCCL_LIKE_RECORDS
    static std::mutex one_at_a_time;
    is_internal_thread = true;
    if (!recorder_is_on()) return;
    const auto text = dump(true, stacks && c10d::getCvarBool({"TORCH_INCLUDE_STACK_TRACE"}, true), c10d::getCvarBool({"TORCH_INCLUDE_ONLY_ACTIVE"}, false));
    std::lock_guard<std::mutex> lock(one_at_a_time);
    write_dump(first_global_rank(), text);
#endif
  }

  // Stacks need the GIL: if it does not come in time, dump without them.
  void dump_in_time() const {
    log_error(group_->prefix() + "ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1, only active collectives: 0");
    for (const bool stacks : {true, false}) {
      auto written = std::make_shared<std::promise<void>>();
      auto future = written->get_future();
      std::thread([written, stacks] {
        write_dump_of_process(stacks);
        written->set_value();
      }).detach();
      if (future.wait_for(Milliseconds(dump_wait_ms_)) == std::future_status::ready) return;
    }
  }

  void open_pipe() {
    const auto stem = c10d::getCvarString({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}, "");
    if (stem.empty() || group_->local_id || !recorder_is_on()) return;
    const auto name = c10::str(stem, group_->global_rank, ".pipe");
    unlink(name.c_str());
    if (!mkfifo(name.c_str(), 0666)) pipe_ = open(name.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  }
  bool pipe_asks() const {
    char some[128];
    return pipe_ >= 0 && read(pipe_, some, sizeof some) > 0;
  }

 public:
  static int first_global_rank(int rank = -1) {  // the rank of the process in its first group
    static int first = rank;
    return first;
  }

 private:
  const std::shared_ptr<GroupFacts> group_;
  int heartbeat_limit_s_, dump_wait_ms_, check_ms_, error_handling_, pipe_ = -1;
  bool dumps_, monitors_, monitor_ends_ = false;
  std::mutex mutex_, monitor_mutex_;
  std::condition_variable wake_, monitor_wakes_;
  std::list<OperationPtr> operations_;
  std::atomic<bool> terminates_{false};
  std::optional<Clock::time_point> terminating_since_;
  std::atomic<uint64_t> heartbeat_{1};
  std::thread watchdog_, monitor_;
};

}  // namespace nccl_like
