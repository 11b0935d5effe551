// The simulated device: one thread that executes kernels in the order in which the process launched them, over all its groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/thread_name.h>
#include <pthread.h>
#include <sched.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <unordered_map>

#include "profiler.hpp"

namespace nccl_like {

inline std::atomic<bool> capture_forbids_queries{false};
inline std::atomic<uint64_t> event_queries{0};
// The watchdog and the monitor may query events, even while a graph is captured; the device's thread does not wait for itself.
inline thread_local bool is_internal_thread = false;

// A point on the device's time line, as a CUDA event. The Flight Recorder asks it, too.
class Event {
 public:
  void record() {
    at_ = Clock::now();
    done_.store(true);
  }
  bool query() const {
    if (!is_internal_thread) {
      event_queries.fetch_add(1);
      if (capture_forbids_queries.load()) {
        const char text[] = "nccl_like: an event was queried while a graph is captured: CUDA invalidates the capture\n";
        [[maybe_unused]] const auto written = write(2, text, sizeof text - 1);
        _exit(99);
      }
    }
    return done_.load();
  }
  bool is_done() const { return done_.load(); }
  Clock::time_point at() const { return at_; }

 private:
  Clock::time_point at_;
  std::atomic<bool> done_{false};
};

struct Kernel {
  std::shared_ptr<Communicator> communicator;  // null for a compute kernel
  std::function<void(const Kernel&)> run;
  std::vector<at::Tensor> tensors;  // read or written
  std::shared_ptr<Event> start = std::make_shared<Event>(), end = std::make_shared<Event>();
  uint64_t number = 0;  // of its launch, from 1; 0 if it was only captured
  std::vector<NcclCall> calls;
  std::vector<void*> tasks;  // the plugin's handles of their launches
  bool captured = false;

  void tell_launch() {
    tasks.clear();
    for (const auto& call : calls) tasks.push_back(Profiler::get().launch(communicator->profiled, call));
  }

  std::shared_ptr<Kernel> again() const {
    auto copy = std::make_shared<Kernel>(*this);
    copy->start = std::make_shared<Event>();
    copy->end = std::make_shared<Event>();
    return copy;
  }
};

using KernelPtr = std::shared_ptr<Kernel>;

class Device {
 public:
  static Device& get() {
    static Device* device = new Device();  // never destroyed: its thread may outlive the interpreter
    return *device;
  }

  // Returns at once. While a graph is captured, the kernel only becomes part of it.
  void launch(const KernelPtr& kernel, bool on_compute_stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto dead = std::move(finished_);
    finished_.clear();
    if (graph_) {
      kernel->captured = true;
      if (!Profiler::get().launches_replays()) kernel->tell_launch();
      graph_->push_back(kernel);
    } else {
      start_thread();
      if (!kernel->captured) kernel->tell_launch();
      kernel->number = launched_.fetch_add(1) + 1;
      for (const auto& tensor : kernel->tensors) storages_[tensor.storage().unsafeGetStorageImpl()] = kernel->number;
      queue_.push_back(kernel);
      if (on_compute_stream) join_compute_stream(kernel->number);
      wake_.notify_all();
    }
    lock.unlock();  // tensors die here, in a thread of the program: the device's may not wait for the GIL
  }

  // The compute stream waits for a kernel: whoever synchronizes with it does, too.
  void join_compute_stream(uint64_t number) {
    uint64_t seen = compute_stream_.load();
    while (seen < number && !compute_stream_.compare_exchange_weak(seen, number)) {
    }
  }

  bool is_busy() const { return launched_.load(std::memory_order_relaxed) != done_.load(std::memory_order_acquire); }
  uint64_t done() const { return done_.load(std::memory_order_acquire); }
  uint64_t compute_stream() const { return compute_stream_.load(); }
  uint64_t pending() const { return launched_.load() - done_.load(); }

  // The number of the last kernel that uses this memory; 0 if none is in flight.
  uint64_t user_of(const c10::StorageImpl* storage) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = storages_.find(storage);
    return found == storages_.end() ? 0 : found->second;
  }

  std::vector<KernelPtr>* begin_capture(std::vector<KernelPtr>* graph) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(graph_, graph);
  }
  bool is_capturing() {
    std::lock_guard<std::mutex> lock(mutex_);
    return graph_ != nullptr;
  }

  void end_compute_kernels() { compute_ends_.fetch_add(1); }
  uint64_t compute_ends() const { return compute_ends_.load(); }

  std::atomic<double> delay_s{0};

  // At the end of the process. Waits for the thread at most two seconds.
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
      wake_.notify_all();
    }
    for (int i = 0; i < 400 && runs_.load(); ++i) std::this_thread::sleep_for(Milliseconds(5));
    std::vector<KernelPtr> dead;
    std::lock_guard<std::mutex> lock(mutex_);
    dead.swap(finished_);
  }
  bool is_stopping() const { return stopping_.load(); }

  void forget_after_fork() {  // the child has no device thread, and nothing is in flight in it
    new (&mutex_) std::mutex();
    new (&wake_) std::condition_variable();
    storages_.clear();
    done_.store(launched_.load());
    runs_.store(false);
    queue_.clear();
  }

 private:
  Device() {
    pthread_atfork(nullptr, nullptr, [] { get().forget_after_fork(); });
  }

  void start_thread() {
    if (runs_.exchange(true)) return;
    std::thread([this] { loop(); }).detach();
  }

  void loop() {
    c10::setThreadName("nccl_like_gpu");
    is_internal_thread = true;
    c10::InferenceMode no_autograd;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !queue_.empty() || stopping_.load(); });
      if (stopping_.load()) break;
      KernelPtr kernel = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      kernel->start->record();
      if (kernel->communicator) pause(delay_s.load());
      if (kernel->captured && Profiler::get().launches_replays()) kernel->tell_launch();
      std::vector<void*> running;
      if (kernel->communicator) running = Profiler::get().start_kernels(kernel->communicator->profiled, kernel->tasks);
      kernel->run(*kernel);
      if (!stopping_.load() && !(kernel->communicator && kernel->communicator->aborted.load())) Profiler::get().stop_kernels(running);
      kernel->end->record();
      lock.lock();
      for (const auto& tensor : kernel->tensors) {
        const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
        if (found != storages_.end() && found->second == kernel->number) storages_.erase(found);
      }
      done_.store(kernel->number, std::memory_order_release);
      finished_.push_back(std::move(kernel));
    }
    runs_.store(false);
  }

  void pause(double seconds) const {
    const auto until = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < until && !stopping_.load()) std::this_thread::sleep_for(Milliseconds(1));
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<KernelPtr> queue_;
  std::vector<KernelPtr> finished_;  // until the program calls again
  std::vector<KernelPtr>* graph_ = nullptr;
  std::unordered_map<const c10::StorageImpl*, uint64_t> storages_;
  std::atomic<uint64_t> launched_{0}, done_{0}, compute_stream_{0}, compute_ends_{0};
  std::atomic<bool> runs_{false}, stopping_{false};
};

// Releases the GIL, if this thread has it.
class NoGil {
 public:
  NoGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~NoGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace nccl_like

// Named as the function of the CUDA runtime in which a thread stands that waits for the device. That one uses all of a core. This one rests
// in turns, because the tests share few cores: it uses four times what commlens takes for work. The argument is the number of a kernel.
// Protected: in a torch that is built for CUDA, the runtime's own function would be called instead.
extern "C" __attribute__((visibility("protected"), noinline)) int cudaStreamSynchronize(void* stream) {
  auto& device = nccl_like::Device::get();
  const auto number = reinterpret_cast<uint64_t>(stream);
  const auto waits = [&] { return device.done() < number && !device.is_stopping(); };
  while (waits()) {
    const auto rest = nccl_like::Clock::now() + nccl_like::Milliseconds(4);
    while (waits() && nccl_like::Clock::now() < rest) sched_yield();
    if (waits()) std::this_thread::sleep_for(nccl_like::Milliseconds(6));
  }
  return 0;
}

namespace nccl_like {

inline void wait_for_kernel(uint64_t number) {
  if (Device::get().done() >= number) return;
  NoGil no_gil;
  cudaStreamSynchronize(reinterpret_cast<void*>(number));
}

// As torch.cuda.synchronize() for the stream that the program computes on.
inline void synchronize() {
  TORCH_CHECK(!Device::get().is_capturing(), "CUDA error: operation not permitted when stream is capturing");
  wait_for_kernel(Device::get().compute_stream());
}

}  // namespace nccl_like
