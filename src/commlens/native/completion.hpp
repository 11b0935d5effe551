// How the recorder learns that a collective is done: its call returns, a thread waits for it, or polling finds it complete.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "box.hpp"
#include "host.hpp"
#include "synchronous.hpp"
#include "threads.hpp"

namespace commlens {

namespace py = pybind11;

class Completion {
 public:
  Completion(Box& box, const Host& host, bool timing) : box_(box), host_(host), timing_(timing) {}

  // --- the call returned

  // The caller waits for the collective at once. That wait also records that the call returned, and finds the token by its thread.
  void hold_for_caller(const TokenPtr& token, const c10d::Work* work) { synchronous_.issued(token, work); }

  // `work` is null if the backend's call waited for the collective itself.
  void returned(const TokenPtr& token, WorkPtr work) {
    const uint64_t now = now_ns();
    box_.mark(token->offset, RETURNED, token->index, now);
    if (token->args->channel->runs_ahead) {
      enqueued(token, work.get());
    } else if (!work) {
      done(*token, HOW_RETURN, now);
    } else {
      synchronous_.forget_work(work.get());
      if (token->stack && !token->args->meets) unwaited_.issued(work.get(), *token);
      token->work = std::move(work);
      hold(token);
    }
  }

  void mark_unknown(const Token& token) { box_.mark_outcome(token.offset, token.index, OUTCOME_UNKNOWN, HOW_UNKNOWN); }

  // --- a thread waits

  // The caller of the collective that this thread has just issued begins to wait.
  TokenPtr caller_wait_begins(const void* work) {
    mark_device_wait(work);
    TokenPtr token = synchronous_.take_by(work);
    if (token) mark_wait(*token);
    return token;
  }

  // `self` is the Python object of the Work, by which a weakly held collective is found.
  TokenPtr wait_begins(const void* work, PyObject* self) {
    unwaited_.handled(work);
    mark_device_wait(work);
    TokenPtr token = synchronous_.take_by(work);
    std::vector<TokenPtr> weakly_held;
    const bool any_in_flight = in_flight_count_.load(std::memory_order_relaxed);
    if (!token && any_in_flight) {
      std::lock_guard<std::mutex> lock(mutex_);
      token = in_flight_.by_work(work);
    }
    if (!token) token = synchronous_.take();
    if (!token && any_in_flight) {
      std::lock_guard<std::mutex> lock(mutex_);
      weakly_held = in_flight_.weakly_held();
    }
    for (const auto& each : weakly_held)
      if (!token && referent(*each).ptr() == self) token = each;
    if (token) mark_wait(*token);
    return token;
  }

  TokenPtr tensor_wait_begins(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != c10::Layout::Strided) return nullptr;
    const void* pointer = tensor.const_data_ptr();
    TokenPtr token;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      token = in_flight_.by_pointer(pointer);
    }
    if (token) mark_wait(*token);
    return token;
  }

  // `work` is the Work that was waited for; null if it is not known.
  void wait_ended(const TokenPtr& token, const py::object* error, const c10d::Work* work = nullptr) {
    if (token->phase != Token::ISSUED) {
      token->phase = Token::ENDED;
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      in_flight_.remove(token);
      in_flight_.drop_weak(token);
      in_flight_.forget_pointers(token);
      update_count();
    }
    if (error) {
      host_.mark_failed(token->offset, token->index, *error, this_thread(), HOW_WAIT);
    } else {
      if (work && token->args->flags & FLAG_ANY_SOURCE) note_source(*token, *work);
      const uint64_t now = now_ns();
      box_.wait_completed(token->offset, token->index, now, this_thread());
      if (timing_) time(*token, now);
    }
  }

  // --- C++ waits: DDP's reducer at the end of a backward pass, and its broadcast of buffers
  //
  // The engine runs final callbacks in the order in which they were queued. Ours is queued with the pass's first collective and the
  // reducer's with its last one, so ours runs just before the reducer waits; there it queues another one, which runs just after.

  // This thread enters a call that waits for the collectives that it issues.
  void cpp_waits() { cpp_since() = now_ns(); }

  // The thread has waited since then. What it issued and is complete was waited for, unless Python did so.
  void waited_in_cpp(uint64_t began) {
    cpp_since() = 0;
    std::vector<Issued> all, own;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      all.swap(issued_for_cpp_);
      for (auto& each : all) (each.thread == this_thread() ? own : issued_for_cpp_).push_back(std::move(each));
    }
    all.clear();
    for (auto& each : own) {
      const TokenPtr token = each.token.lock();
      if (token && !is_over(*token)) {
        all.push_back(std::move(each));
        continue;
      }
      if (token) completed(token);
      box_.waited(each.offset, each.index, std::max(began, each.since), now_ns());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : all)
      if (issued_for_cpp_.size() < ISSUED_MAX) issued_for_cpp_.push_back(std::move(each));
  }
  void waited_in_cpp() { waited_in_cpp(cpp_since()); }

  // --- polling, from the watchdog thread, with the GIL

  // Polls the collectives in flight and returns the oldest one that is not done. A Work that cannot say whether it is done is held
  // only until the next sweep; a weak reference to its Python object replaces it.
  TokenPtr sweep() {
    TokenPtr oldest;
    const uint64_t now = now_ns();
    sweep_held(now, oldest);
    sweep_synchronous(now, oldest);
    sweep_weakly_held(oldest);
    return oldest;
  }

  void handled(const c10d::Work* work) { unwaited_.handled(work); }
  std::unordered_map<uint64_t, uint64_t> unwaited() { return unwaited_.found(); }

  // Removes the collectives that were enqueued on a device, and returns those that are not known to be complete: Python asks about them.
  std::deque<TokenPtr> take_enqueued() {
    std::deque<TokenPtr> taken, open;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      taken.swap(enqueued_);
    }
    for (auto& token : taken)
      if (!token->flight || !token->flight->done.load()) open.push_back(std::move(token));
    return open;
  }

  // How many Works are held and outputs remembered.
  size_t held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_.held().size() + in_flight_.pointers();
  }

  void release() {
    InFlight old;
    std::deque<TokenPtr> enqueued;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(in_flight_, old);
    update_count();
    enqueued_.swap(enqueued);
  }

 private:
  static constexpr int NO_PASS = -1;
  static constexpr uint64_t HOLD_WEAKLY_AFTER_NS = 200000000;
  static constexpr size_t ISSUED_MAX = 512;
  static constexpr size_t ENQUEUED_MAX = 16384;  // between two looks of the watchdog thread

  // Leaves it to the backend's completion hook, or to torch's recorder, to tell when the device is done: no Work is held, since it would
  // keep tensors alive, and none is polled, since that queries an event.
  void enqueued(const TokenPtr& token, c10d::Work* work) {
    mark_unknown(*token);
    const Channel& channel = *token->args->channel;
    const bool is_message = !token->number || token->args->point_to_point;
    if (timing_) newest_message() = is_message ? Message{work, token->offset, token->index} : Message{};
    try {
      if (token->captured)
        ;  // it does not run
      else if (channel.hooks && work)
        token->flight = channel.hooks->issued(*work, token->index, token->offset, token->since);
      else if (!is_message)
        token->backend_number = channel.backend ? channel.backend->getSequenceNumberForGroup() : 0;
      else if (work && channel.tells_results)
        token->result = result_of(*work);
    } catch (const std::exception&) {  // the backend does not count, or does not tell: the state stays unknown
    }
    TokenPtr former;
    std::lock_guard<std::mutex> lock(mutex_);
    enqueued_.push_back(token);
    if (enqueued_.size() > ENQUEUED_MAX) {
      former = std::move(enqueued_.front());
      enqueued_.pop_front();
    }
  }

  // torch has getFutureResult since 2.6 or so.
  template <class Work>
  static auto result_of(Work& work) -> decltype(work.getFutureResult()) {
    return work.getFutureResult();
  }
  template <class... None>
  static c10::intrusive_ptr<c10::ivalue::Future> result_of(const None&...) {
    return nullptr;
  }

  void sweep_held(uint64_t now, TokenPtr& oldest) {
    std::vector<TokenPtr> held;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      held = in_flight_.held();
    }
    for (const auto& token : held) {
      if (token->args->wait_only) {
        if (now > token->since + HOLD_WEAKLY_AFTER_NS) hold_weakly(token);
      } else if (is_completed(token)) {
        completed(token);
        continue;
      }
      keep_older(oldest, token);
    }
  }

  void sweep_synchronous(uint64_t now, TokenPtr& oldest) {
    for (const auto& token : synchronous_.all()) {
      auto issued = Token::ISSUED;
      if (token->phase == Token::WAITED_FOR) {
        keep_older(oldest, token);
      } else if (now > token->since + HOLD_WEAKLY_AFTER_NS && token->phase.compare_exchange_strong(issued, Token::ENDED)) {
        mark_unknown(*token);  // its caller never waited
      }
    }
  }

  void sweep_weakly_held(TokenPtr& oldest) {
    std::vector<TokenPtr> weakly_held;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      weakly_held = in_flight_.weakly_held();
    }
    for (const auto& token : weakly_held) {
      if (box_.overwritten(token->index)) {
        std::lock_guard<std::mutex> lock(mutex_);
        in_flight_.drop_weak(token);
        in_flight_.forget_pointers(token);
        update_count();
      } else if (token->waiting) {
        keep_older(oldest, token);
      } else if (!token->unknown && referent(*token).is_none()) {
        token->unknown = true;
        mark_unknown(*token);
      } else if (!token->unknown) {
        keep_older(oldest, token);
      }
    }
  }

  static void keep_older(TokenPtr& oldest, const TokenPtr& token) {
    if (!oldest || token->index < oldest->index) oldest = token;
  }

  // Records whose message a receive from any source took.
  void note_source(const Token& token, const c10d::Work& work) {
    try {
      const int source = work.sourceRank();
      if (source >= 0) box_.mark_value(token.offset, SOURCE, token.index, static_cast<uint64_t>(source) + 1);
    } catch (const std::exception&) {  // the backend does not tell: the source stays unknown
    }
  }

  void mark_wait(Token& token) {
    token.waiting = true;
    box_.wait_began(token.offset, token.index, now_ns(), this_thread(), token.args->synchronous);
  }

  // Each new collective also polls the oldest one, so that no Work (and no tensor) is held for long.
  void hold(const TokenPtr& token) {
    TokenPtr oldest;
    bool full = false;
    if (in_flight_count_.load(std::memory_order_relaxed)) {
      std::lock_guard<std::mutex> lock(mutex_);
      oldest = in_flight_.oldest();
      full = in_flight_.full();
    }
    if (oldest) {
      if (!oldest->args->wait_only && is_completed(oldest))
        completed(oldest);
      else if (full)
        evict(oldest);
    }
    const int pass = torch::autograd::get_current_graph_task_id();
    const bool for_cpp = (pass != NO_PASS || cpp_since()) && !token->args->wait_only;
    std::vector<TokenPtr> dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      in_flight_.hold(token, dropped);
      update_count();
      if (for_cpp && issued_for_cpp_.size() >= ISSUED_MAX)  // of threads in which no pass ends
        issued_for_cpp_.erase(issued_for_cpp_.begin(), issued_for_cpp_.begin() + ISSUED_MAX / 2);
      if (for_cpp) issued_for_cpp_.push_back({token, token->index, token->offset, token->since, token->thread});
    }
    if (for_cpp && pass != NO_PASS && pass != queued_pass()) follow(pass);
  }

  struct Issued {  // it keeps no Work alive
    std::weak_ptr<Token> token;
    uint64_t index, offset, since;
    uint32_t thread;
  };

  struct Message {
    const void* work = nullptr;
    uint64_t offset = 0, index = 0;
  };
  static Message& newest_message() {  // on a device, that this thread issued last; with timing
    thread_local Message message;
    return message;
  }

  // If this thread waits for the message that it has just issued, so does its device, while the call returns at once.
  void mark_device_wait(const void* work) {
    if (!timing_) return;
    const Message message = std::exchange(newest_message(), {});
    if (!message.work || message.work != work) return;
    const uint64_t now = now_ns();
    box_.mark(message.offset, WAIT_BEGAN, message.index, now);
    box_.mark(message.offset, WAIT_ENDED, message.index, now);
  }

  static uint64_t& cpp_since() {  // when this thread entered such a call; 0: it is in none
    thread_local uint64_t since = 0;
    return since;
  }

  static int& queued_pass() {  // the pass in which this thread has queued our callback
    thread_local int pass = NO_PASS;
    return pass;
  }

  void follow(int pass) {
    queued_pass() = pass;
    torch::autograd::Engine::get_default_engine().queue_callback([this] {
      // The engine may move this callback when another one is queued: nothing of it is used after that.
      queued_pass() = NO_PASS;
      const uint64_t began = now_ns();
      torch::autograd::Engine::get_default_engine().queue_callback([this, began] {
        try {
          waited_in_cpp(began);
        } catch (const std::exception& error) {
          host_.failed(error.what());
        }
      });
    });
  }

  // Whether it is complete, also if a thread that waits for its future has learned so just before the Work says it.
  static bool is_over(const Token& token) {
    if (!token.work || token.work->isCompleted()) return true;
    try {
      const auto future = token.work->getFuture();
      return future && future->completed();
    } catch (const std::exception&) {  // it has no future to ask
      return false;
    }
  }

  static bool is_completed(const TokenPtr& token) { return token->work->isCompleted(); }

  // Drops the oldest Work when too many are held: its state cannot be learned any more, unless a thread waits for it.
  void evict(const TokenPtr& token) {
    if (token->args->wait_only) {
      if (!python_runs()) return;
      Gil gil;
      hold_weakly(token);
      return;
    }
    bool ours;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ours = in_flight_.remove(token);
      if (ours) in_flight_.forget_pointers(token);
      update_count();
    }
    if (ours) {
      token->unknown = true;
      mark_unknown(*token);
    }
  }

  void completed(const TokenPtr& token) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!in_flight_.remove(token)) return;
      in_flight_.forget_pointers(token);
      update_count();
    }
    if (has_error(*token->work) && python_runs()) {
      Gil gil;
      PyErrKeeper keep;
      py::object error = host_.call("error_of", py::cast(token->work));
      if (!error.is_none()) {
        host_.mark_failed(token->offset, token->index, error, 0, HOW_POLL);
        return;
      }
    }
    done(*token, HOW_POLL, now_ns());
  }

  // A Work that failed is completed, too.
  static bool has_error(c10d::Work& work) {
    try {
      const auto future = work.getFuture();
      return future && future->completed() && future->hasError();
    } catch (const std::exception&) {  // it has no future to ask
      return false;
    }
  }

  // With the GIL.
  void hold_weakly(const TokenPtr& token) {
    py::object work = py::cast(token->work);
    PyObject* watched = PyWeakref_NewRef(work.ptr(), nullptr);
    if (!watched) throw py::error_already_set();
    PyRef reference = PyRef::of(watched);
    Py_DECREF(watched);
    WorkPtr dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!in_flight_.remove(token)) return;  // its wait has just ended
    token->watched = std::move(reference);
    in_flight_.hold_weakly(token);
    std::swap(dropped, token->work);
  }

  // The Work that a token holds weakly; None once it is gone. With the GIL.
  static py::object referent(const Token& token) {
    if (!token.watched) return py::none();
    PyObject* found = PyObject_CallNoArgs(token.watched.get());
    if (!found) PyErr_Clear();
    return found ? py::reinterpret_steal<py::object>(found) : py::none();
  }

  void done(Token& token, uint64_t how, uint64_t now) {
    if (timing_ && how == HOW_RETURN) time(token, now);
    box_.mark(token.offset, DONE, token.index, now);
    box_.mark_outcome(token.offset, token.index, OUTCOME_COMPLETED, how);
  }

  // Records the duration. Only for collectives whose end was seen as it happened, not for those found done by polling.
  void time(Token& token, uint64_t now) {
    box_.mark_value(token.offset, DURATION, token.index, (now - token.since) / TICK_NS);
  }

  // Under the mutex.
  void update_count() { in_flight_count_.store(in_flight_.size(), std::memory_order_relaxed); }

  Box& box_;
  const Host& host_;
  const bool timing_;
  Synchronous synchronous_;
  Unwaited unwaited_;
  // A thread that holds it takes no GIL and drops no Work, tensor or Python object: these are moved to a local that is declared before
  // the lock.
  std::mutex mutex_;
  InFlight in_flight_;
  std::vector<Issued> issued_for_cpp_;
  std::atomic<size_t> in_flight_count_{0};  // if 0, a thread need not lock to find that there is none
  std::deque<TokenPtr> enqueued_;  // on a device, since Python last took them
};

}  // namespace commlens
