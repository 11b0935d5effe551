// How the end of a collective is learned: its call returns, a thread waits for it, or it is found done by looking.
#pragma once

#include <deque>
#include <mutex>

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

  // The caller waits in its next breath. That wait will say that the call returned, and needs no Work to find us.
  void caller_waits(const TokenPtr& token, const c10d::Work* work) { synchronous_.begins(token, work); }

  // `work` is null where the backend's call has waited.
  void returned(const TokenPtr& token, WorkPtr work) {
    const uint64_t now = now_ns();
    box_.mark(token->offset, RETURNED, token->index, now);
    if (!work) {
      done(*token, HOW_RETURN, now);
    } else if (token->args->channel->holds_works) {
      synchronous_.not_this(work.get());
      token->work = std::move(work);
      hold(token);
    } else {
      // On an accelerator a Work would keep tensors alive, and asking it queries an event: torch's recorder tells, or nobody.
      never_known(*token);
      TokenPtr former;
      std::lock_guard<std::mutex> lock(mutex_);
      on_accelerator_.push_back(token);
      if (on_accelerator_.size() > box_.capacity()) {
        former = std::move(on_accelerator_.front());
        on_accelerator_.pop_front();
      }
    }
  }

  void never_known(const Token& token) { box_.mark_outcome(token.offset, token.index, OUTCOME_UNKNOWN, HOW_UNKNOWN); }

  // --- a thread waits

  // The caller of the collective that this thread has just issued.
  TokenPtr caller_begins_to_wait(const void* work) {
    TokenPtr token = synchronous_.found_by(work);
    if (token) wait_marks(*token);
    return token;
  }

  // `self` is the Python object of the Work, by which it is found once it is held no longer.
  TokenPtr wait_begins(const c10d::Work* work, PyObject* self) {
    TokenPtr token = synchronous_.found_by(work);
    std::vector<TokenPtr> loose;
    const bool others = under_way_count_.load(std::memory_order_relaxed);
    if (!token && others) {
      std::lock_guard<std::mutex> lock(mutex_);
      token = under_way_.by_work(work);
    }
    if (!token) token = synchronous_.found();
    if (!token && others) {
      std::lock_guard<std::mutex> lock(mutex_);
      loose = under_way_.loose();
    }
    for (const auto& each : loose)
      if (!token && referent(*each).ptr() == self) token = each;
    if (token) wait_marks(*token);
    return token;
  }

  TokenPtr tensor_wait_begins(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != c10::Layout::Strided) return nullptr;
    const void* pointer = tensor.const_data_ptr();
    TokenPtr token;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      token = under_way_.by_pointer(pointer);
    }
    if (token) wait_marks(*token);
    return token;
  }

  void wait_ended(const TokenPtr& token, const py::object* error) {
    if (token->phase != Token::ISSUED) {
      token->phase = Token::ENDED;
    } else {
      std::lock_guard<std::mutex> lock(mutex_);
      under_way_.let_go(token);
      under_way_.tighten(token);
      under_way_.forget_pointers(token);
      counted();
    }
    if (error) {
      host_.mark_failed(token->offset, token->index, *error, this_thread(), HOW_WAIT);
    } else {
      const uint64_t now = now_ns();
      box_.wait_completed(token->offset, token->index, now, this_thread());
      if (timing_) time(*token, now);
    }
  }

  // --- nobody waits: from the watchdog thread, with the GIL

  // Looks at what is in flight; the oldest that is not done. A Work that cannot say whether it is done is held no longer than
  // until the next sweep, and watched through a weak reference to its Python object from then on.
  TokenPtr sweep() {
    TokenPtr oldest;
    const uint64_t now = now_ns();
    sweep_held(now, oldest);
    sweep_synchronous(now, oldest);
    sweep_loose(oldest);
    return oldest;
  }

  // On an accelerator: what torch's recorder is asked about.
  std::deque<TokenPtr> take_on_accelerator() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(on_accelerator_, {});
  }

  // How many Works are held, and outputs remembered.
  size_t held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return under_way_.held().size() + under_way_.pointers();
  }

  void release() {
    UnderWay old;
    std::deque<TokenPtr> on_accelerator;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(under_way_, old);
    counted();
    on_accelerator_.swap(on_accelerator);
  }

 private:
  static constexpr uint64_t LOOSEN_AFTER_NS = 200000000;

  void sweep_held(uint64_t now, TokenPtr& oldest) {
    std::vector<TokenPtr> held;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      held = under_way_.held();
    }
    for (const auto& token : held) {
      if (token->args->wait_only) {
        if (now > token->since + LOOSEN_AFTER_NS) loosen(token);
      } else if (is_completed(token)) {
        completed(token);
        continue;
      }
      older(oldest, token);
    }
  }

  void sweep_synchronous(uint64_t now, TokenPtr& oldest) {
    for (const auto& token : synchronous_.all()) {
      auto issued = Token::ISSUED;
      if (token->phase == Token::WAITED_FOR) {
        older(oldest, token);
      } else if (now > token->since + LOOSEN_AFTER_NS && token->phase.compare_exchange_strong(issued, Token::ENDED)) {
        never_known(*token);  // its caller never waited
      }
    }
  }

  void sweep_loose(TokenPtr& oldest) {
    std::vector<TokenPtr> loose;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loose = under_way_.loose();
    }
    for (const auto& token : loose) {
      if (box_.overwritten(token->index)) {
        std::lock_guard<std::mutex> lock(mutex_);
        under_way_.tighten(token);
        under_way_.forget_pointers(token);
        counted();
      } else if (token->waiting) {
        older(oldest, token);
      } else if (!token->unknown && referent(*token).is_none()) {
        token->unknown = true;
        never_known(*token);
      } else if (!token->unknown) {
        older(oldest, token);
      }
    }
  }

  static void older(TokenPtr& oldest, const TokenPtr& token) {
    if (!oldest || token->index < oldest->index) oldest = token;
  }

  void wait_marks(Token& token) {
    token.waiting = true;
    box_.wait_began(token.offset, token.index, now_ns(), this_thread(), token.args->synchronous);
  }

  // Amortised: each new collective looks at the oldest one, so that no Work (and no tensor) is held for long.
  void hold(const TokenPtr& token) {
    TokenPtr oldest;
    bool full = false;
    if (under_way_count_.load(std::memory_order_relaxed)) {
      std::lock_guard<std::mutex> lock(mutex_);
      oldest = under_way_.oldest();
      full = under_way_.full();
    }
    if (oldest) {
      if (!oldest->args->wait_only && is_completed(oldest))
        completed(oldest);
      else if (full)
        give_up(oldest);
    }
    std::vector<TokenPtr> dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    under_way_.hold(token, dropped);
    counted();
  }

  static bool is_completed(const TokenPtr& token) { return token->work->isCompleted(); }

  // Too many are held, of a kind that nobody waits for: the state of this one cannot be known any more.
  void give_up(const TokenPtr& token) {
    if (token->args->wait_only) {
      if (!python_runs()) return;
      Gil gil;
      loosen(token);
      return;
    }
    bool ours;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ours = under_way_.let_go(token);
      if (ours) under_way_.forget_pointers(token);
      counted();
    }
    if (ours) {
      token->unknown = true;
      never_known(*token);
    }
  }

  void completed(const TokenPtr& token) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!under_way_.let_go(token)) return;
      under_way_.forget_pointers(token);
      counted();
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

  // One that failed says that it is completed, too.
  static bool has_error(c10d::Work& work) {
    try {
      const auto future = work.getFuture();
      return future && future->completed() && future->hasError();
    } catch (const std::exception&) {  // it has no future to ask
      return false;
    }
  }

  // With the GIL.
  void loosen(const TokenPtr& token) {
    py::object work = py::cast(token->work);
    PyObject* watched = PyWeakref_NewRef(work.ptr(), nullptr);
    if (!watched) throw py::error_already_set();
    PyRef reference = PyRef::of(watched);
    Py_DECREF(watched);
    WorkPtr dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!under_way_.let_go(token)) return;  // its wait ended just now
    token->watched = std::move(reference);
    under_way_.loosen(token);
    std::swap(dropped, token->work);
  }

  // With the GIL: the Work that a token watches; None once it is gone.
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

  // How long it took, where the moment of its end is known: not where it was found done by looking.
  void time(Token& token, uint64_t now) {
    box_.mark_value(token.offset, DURATION, token.index, (now - token.since) / TICK_NS);
  }

  // Under the mutex.
  void counted() { under_way_count_.store(under_way_.size(), std::memory_order_relaxed); }

  Box& box_;
  const Host& host_;
  const bool timing_;
  Synchronous synchronous_;
  // While it is held, no GIL is taken, and no Work, tensor or Python object dropped: what goes is moved to a local that was
  // declared before the lock.
  std::mutex mutex_;
  UnderWay under_way_;
  std::atomic<size_t> under_way_count_{0};  // a thread that finds none has issued none
  std::deque<TokenPtr> on_accelerator_;
};

}  // namespace commlens
