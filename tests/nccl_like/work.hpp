// The handle of an asynchronous operation, and what the watchdog keeps of each operation.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

#include "programs.hpp"
#include "recorder.hpp"

namespace nccl_like {

inline std::atomic<int64_t> works_alive{0};

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#define NCCL_LIKE_HOOKS 1
#endif
inline std::atomic<bool> works_have_keys{true};  // a test's setting: else the address of a Work is its key
inline std::atomic<bool> is_nccl2{false};        // a setting: as nccl2, the backend "nccl" of torch 2.15

// Printed as ProcessGroupNCCL.cpp does, with the rank that torch puts before it.
inline void log_error(const std::string& text) { LOG_AT_FILE_LINE(ERROR, "ProcessGroupNCCL.cpp", 1) << text; }
// As nccl2 does.
inline void log_tc(const char* file, int rank, const std::string& name, const std::string& text) {
  LOG_AT_FILE_LINE(ERROR, file, 1) << "[TC][rank=" << rank << "][name=" << name << "] " << text;
}

// Queries of events in its scope are the backend's own: they are not counted, and do no harm to a capture.
class Internally {
 public:
  Internally() : before_(std::exchange(is_internal_thread, true)) {}
  ~Internally() { is_internal_thread = before_; }
  Internally(const Internally&) = delete;
  Internally& operator=(const Internally&) = delete;

 private:
  const bool before_;
};

// Shared by the Work, if there is one, and the watchdog's list.
struct Operation {
  int rank = 0;
  c10d::OpType type = c10d::OpType::UNKNOWN;
  uint64_t seq = 0;
  const uint64_t key = next_key();
  bool is_p2p = false, is_barrier = false, blocking_wait = false;
  std::string group_name;
  size_t numel_in = 0, numel_out = 0;
  Milliseconds timeout{0};
  Clock::time_point created = Clock::now();
  KernelPtr kernel;
  std::shared_ptr<Event> start, end;
  bool timing = false;
  EntryId entry;
  c10::intrusive_ptr<c10::ivalue::Future> result = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
  std::mutex mutex;
  std::exception_ptr error;
  std::atomic<bool> timed_out{false};

  static uint64_t next_key() {
    static std::atomic<uint64_t> last{0};
    return last.fetch_add(1) + 1;
  }

  const std::string& prefix() const {
    static const std::string text = c10::str("[Rank ", rank, "] ");
    return text;
  }

  std::string text() const {
    return c10::str(
        "WorkNCCL(SeqNum=", seq, ", OpType=", c10d::opTypeToString(type), ", NumelIn=", numel_in, ", NumelOut=", numel_out,
        ", Timeout(ms)=", timeout.count(), ")");
  }

  std::exception_ptr failure() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }

  void fail(const std::string& message, c10d::WorkResult how) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (!error) {
        error = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, message));
        timed_out.store(how == c10d::WorkResult::TIMEOUT);
      }
    }
    mark(how);
  }

  void mark(c10d::WorkResult how) {
    if (!result->completed()) result->markCompleted(c10::IValue(static_cast<uint8_t>(how)));
  }

  bool has_timed_out(std::optional<Milliseconds> limit = std::nullopt) {
    const auto ran = std::chrono::duration_cast<Milliseconds>(Clock::now() - created);
    if (ran < limit.value_or(timeout)) return false;
    if (is_nccl2.load()) {
      if (!failure()) log_tc("WorkNCCL.cpp", rank, group_name, c10::str("Operation timed out after ", ran.count(), " ms"));
      fail("Watchdog caught collective operation timeout: NCCL operation timed out", c10d::WorkResult::TIMEOUT);
      return true;
    }
    const std::string message = c10::str(
        prefix(), "Watchdog caught collective operation timeout: ", text(), " ran for ", ran.count(), " milliseconds before timing out.");
    log_error(message);
    fail(message, c10d::WorkResult::TIMEOUT);
    return true;
  }

  [[noreturn]] void take_the_process_down() {
    log_error(prefix() + "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
                         "operations might run on corrupted/incomplete data.");
    log_error(prefix() + "To avoid data inconsistency, we are taking the entire process down.");
    std::rethrow_exception(failure());
  }
};

using OperationPtr = std::shared_ptr<Operation>;

class WorkNCCL : public c10d::Work {
 public:
  WorkNCCL(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs, OperationPtr operation)
      : c10d::Work(rank, type, title, title ? std::optional<std::vector<at::Tensor>>(inputs) : std::nullopt), operation_(std::move(operation)) {
    works_alive.fetch_add(1);
  }
  ~WorkNCCL() override { works_alive.fetch_sub(1); }

  // Complete from the start, as a future whose tensors are ordered by the stream.
  void issued(std::vector<at::Tensor> outputs) {
    outputs_ = std::move(outputs);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (recordFunctionEndCallback_) {
      future_->addCallback([end = recordFunctionEndCallback_](c10::ivalue::Future&) { end(); });
    }
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return is_nccl2.load() ? check() : operation_->failure() || operation_->end->query(); }
  bool isSuccess() const override {
    if (is_nccl2.load()) return !operation_->failure();
    C10_THROW_ERROR(NotImplementedError, "WorkNCCL::isSuccess() is deprecated");
  }
  std::exception_ptr exception() const override { return operation_->failure(); }

  void synchronize() override { Device::get().join_compute_stream(operation_->kernel->number); }

  bool wait(Milliseconds timeout) override {
    synchronize();
    if (is_nccl2.load()) return wait_as_nccl2(timeout);
    if (operation_->blocking_wait || timeout != kNoTimeout) {
      while (!operation_->end->is_done()) {
        if (operation_->has_timed_out(timeout == kNoTimeout ? std::nullopt : std::make_optional(timeout))) {
          log_error(c10::str(operation_->prefix(), "Work ", operation_->text(), " timed out in blocking wait."));
          break;
        }
        std::this_thread::sleep_for(Milliseconds(1));
      }
    } else if (operation_->is_barrier && !operation_->end->is_done()) {
      nccl_like::synchronize();
    }
    if (operation_->failure()) {
      abort();
      operation_->take_the_process_down();
    }
    return true;
  }

  void abort() override { operation_->kernel->communicator->aborted.store(true); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    if (is_nccl2.load()) check();
    return operation_->result;
  }
  uint64_t getSequencenumber() const override { return operation_->seq; }
#ifdef NCCL_LIKE_HOOKS
  uint64_t getCompletionKey() const override { return works_have_keys.load() ? operation_->key : c10d::Work::getCompletionKey(); }
#endif
  float getDuration() const override {
    TORCH_CHECK(operation_->timing, "getDuration only works if timing was enabled");
    return std::chrono::duration<float, std::milli>(operation_->end->at() - operation_->start->at()).count();
  }

  const OperationPtr& operation() const { return operation_; }

 private:
  // nccl2 queries the device in the thread that asks: returns whether the operation is over.
  bool check() {
    // torch's hooks do not ask during a capture on a GPU, and cannot know of one here
    if (!operation_->kernel->number && Device::get().is_capturing()) return false;
    operation_->end->query();
    const Internally ours;
    if (operation_->failure()) return true;
    if (!operation_->end->query()) return operation_->has_timed_out();
    operation_->mark(c10d::WorkResult::SUCCESS);
    return true;
  }

  bool wait_as_nccl2(Milliseconds timeout) {
    if (timeout == kNoTimeout && Device::get().is_capturing()) return true;
    const Internally ours;
    if (operation_->blocking_wait || timeout != kNoTimeout) {
      const auto limit = timeout == kNoTimeout ? std::nullopt : std::make_optional(timeout);
      while (!operation_->end->is_done() && !operation_->failure() && !operation_->has_timed_out(limit)) std::this_thread::sleep_for(Milliseconds(1));
      if (operation_->failure() && operation_->blocking_wait) abort();
    } else if (operation_->is_barrier) {
      nccl_like::synchronize();
    }
    if (!check()) return true;
    if (const auto error = operation_->failure()) std::rethrow_exception(error);
    return true;
  }

  const OperationPtr operation_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What nccl2 returns for each message of a batch: complete when it is issued, and without a completion key of its own.
class CompletedWork : public c10d::Work {
 public:
  explicit CompletedWork(std::vector<at::Tensor> outputs = {}) : outputs_(std::move(outputs)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {}
  bool wait(Milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  const std::vector<at::Tensor> outputs_;
};

}  // namespace nccl_like
