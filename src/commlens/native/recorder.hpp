// The recorder on the hot path. commlens/capture/recorder.py is its other half and its twin: it holds what is rare, and does all of
// it where nothing was built. The two write the same records.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <deque>
#include <optional>

#include "box.hpp"
#include "signature.hpp"
#include "stacks.hpp"
#include "tokens.hpp"

namespace commlens {

inline uint32_t& cached_thread_id() {
  thread_local uint32_t id = 0;
  return id;
}

inline uint32_t this_thread() {
  uint32_t& id = cached_thread_id();
  if (!id) id = static_cast<uint32_t>(syscall(SYS_gettid));
  return id;
}

namespace py = pybind11;

// A coalesced group that a thread is building.
struct Coalescing {
  uint64_t id = 0, members = 0, number = 0;
  AskedPtr first;
};

class Recorder {
 public:
  Recorder(Box& box, py::object host, bool cpp_stack, bool timing)
      : box_(box), host_(host.release().ptr()), cpp_stack_(cpp_stack), timing_(timing) {}

  std::atomic<bool> verifies{false};  // every collective is shown to the host before it is issued

  // --- the tap's calls

  // Writes the record before the backend sees the op. Throws only what a verifier raised.
  TokenPtr begin(const OpSpec& spec, Arguments arguments) {
    const bool verified = verifies.load(std::memory_order_relaxed);
    TokenPtr token;
    try {
      token = announce(spec, arguments, verified ? 0 : FLAG_ENTERED);
    } catch (const std::exception& error) {
      failed(error.what());
      return nullptr;
    }
    if (verified && token && !token->coalesced) {
      verify(spec, arguments, token);
      box_.mark(token->offset, ENTERED, token->index, now_ns());
    }
    return token;
  }

  // The backend has it; `result` is its Work, or null where the call has waited.
  void returned(const TokenPtr& token, const c10::IValue* result) noexcept {
    try {
      token->asked->channel->busy.store(0, std::memory_order_relaxed);
      if (token->verified && python_runs()) {
        Gil gil;
        PyErrKeeper keep;
        host().attr("issued_natively")(py::handle(token->verified.get()));
      }
      WorkPtr work = result ? work_of(*result) : WorkPtr();
      if (token->asked->synchronous && work) {
        // The caller waits in its next breath. That wait will say that the call returned, and needs no Work to find us.
        TokenPtr former;
        std::lock_guard<std::mutex> lock(mutex_);
        former = under_way_.begin_synchronous(token);
      } else if (token->coalesced) {
        box_.mark_outcome(token->offset, token->index, OUTCOME_UNKNOWN, HOW_UNKNOWN);
      } else {
        returned_work(token, std::move(work));
      }
    } catch (const std::exception& error) {
      failed(error.what());
    }
  }

  void returned_work(const TokenPtr& token, WorkPtr work) {
    const uint64_t now = now_ns();
    box_.mark(token->offset, RETURNED, token->index, now);
    if (!work) {
      done(*token, HOW_RETURN, now);
    } else if (token->asked->channel->polls) {
      token->work = std::move(work);
      hold(token);
    } else {
      // On an accelerator a Work would keep tensors alive, and asking it queries an event: torch's recorder tells, or nobody.
      box_.mark_outcome(token->offset, token->index, OUTCOME_UNKNOWN, HOW_UNKNOWN);
      TokenPtr former;
      std::lock_guard<std::mutex> lock(mutex_);
      unpolled_.push_back(token);
      if (unpolled_.size() > box_.capacity()) {
        former = std::move(unpolled_.front());
        unpolled_.pop_front();
      }
    }
  }

  // The backend refused it, or waited in vain.
  void raised(const TokenPtr& token, const std::exception_ptr& error) noexcept {
    try {
      Gil gil;
      PyErrKeeper keep;
      ended_by(token, as_python(error));
    } catch (const std::exception& ours) {
      failed(ours.what());
    }
  }

  void ended_by(const TokenPtr& token, const py::object& error) {
    token->asked->channel->busy.store(0, std::memory_order_relaxed);
    bool freed = false;
    if (!token->coalesced && host().attr("was_not_issued")(py::handle(token->asked->python.get()), error).cast<bool>()) {
      if (token->verified) host().attr("withdraw")(py::handle(token->verified.get()));
      freed = give_number_back(*token);
    }
    if (token->coalesced) {
      Coalescing dropped;
      std::lock_guard<std::mutex> lock(mutex_);
      dropped = take_coalescing(token->thread);
    }
    host().attr("mark_failed")(token->offset, token->index, error, 0, HOW_RETURN);
    if (freed) host().attr("forget_number")(token->offset, token->index);
  }

  // An op that was not issued meets nobody: the next one of its channel has its number. Not where another thread has drawn since.
  static bool give_number_back(const Token& token) {
    if (token.coalesced || !token.number) return false;
    uint64_t tagged = token.tagged_number, number = token.number;
    if (tagged && token.asked->tagged) token.asked->tagged->compare_exchange_strong(tagged, tagged - 1);
    return token.asked->number->compare_exchange_strong(number, number - 1);
  }

  // --- waiting

  // `self` is the Python object of the Work, by which it is found once it is held no longer.
  TokenPtr wait_begins(const c10d::Work* work, PyObject* self) {
    const uint32_t thread = this_thread();
    TokenPtr token;
    std::vector<TokenPtr> loose;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      token = under_way_.by_work(work);
      if (!token) token = under_way_.synchronous_of(thread);
      if (!token && under_way_.any_loose()) loose = under_way_.loose();
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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (token->asked->synchronous)
        under_way_.end_synchronous(token);
      else
        under_way_.let_go(token);
      under_way_.tighten(token);
      under_way_.forget_pointers(token);
    }
    if (error) {
      host().attr("mark_failed")(token->offset, token->index, *error, this_thread(), HOW_WAIT);
    } else {
      const uint64_t now = now_ns();
      box_.wait_completed(token->offset, token->index, now, this_thread());
      if (timing_) time(*token, now);
    }
  }

  // --- coalesced groups

  void coalescing_starts() {
    Coalescing group;
    group.id = coalescing_ids_.fetch_add(1) + 1;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!coalescing_.count(this_thread())) coalescing_count_.fetch_add(1);
    std::swap(coalescing_[this_thread()], group);
  }

  // The group that this thread has built; none where it has no members.
  std::optional<Coalescing> coalescing_ends() {
    std::lock_guard<std::mutex> lock(mutex_);
    Coalescing group = take_coalescing(this_thread());
    if (!group.members) return std::nullopt;
    return group;
  }

  // --- from the watchdog thread, with the GIL

  // Looks at what is in flight; the oldest that is not done. A Work that cannot say whether it is done is held no longer than
  // until the next sweep, and watched through a weak reference to its Python object from then on.
  TokenPtr sweep() {
    TokenPtr oldest;
    const uint64_t now = now_ns();
    auto older = [&oldest](const TokenPtr& token) {
      if (!oldest || token->index < oldest->index) oldest = token;
    };
    std::vector<TokenPtr> held, loose;
    std::vector<std::pair<uint32_t, TokenPtr>> synchronous;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      held = under_way_.held();
      synchronous = under_way_.synchronous();
    }
    for (const auto& token : held) {
      if (token->asked->wait_tells) {
        if (now > token->since + LOOSEN_AFTER_NS) loosen(token);
      } else if (is_completed(token)) {
        completed(token);
        continue;
      }
      older(token);
    }
    for (const auto& entry : synchronous) {
      const TokenPtr& token = entry.second;
      if (token->waiting) {
        older(token);
      } else if (now > token->since + LOOSEN_AFTER_NS) {
        std::unique_lock<std::mutex> lock(mutex_);
        const bool ended = under_way_.end_synchronous(token);
        lock.unlock();
        if (ended) box_.mark_outcome(token->offset, token->index, OUTCOME_UNKNOWN, HOW_UNKNOWN);  // its caller never waited
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loose = under_way_.loose();
    }
    for (const auto& token : loose) {
      if (box_.overwritten(token->index)) {
        std::lock_guard<std::mutex> lock(mutex_);
        under_way_.tighten(token);
        under_way_.forget_pointers(token);
      } else if (token->waiting) {
        older(token);
      } else if (!token->unknown && referent(*token).is_none()) {
        token->unknown = true;
        box_.mark_outcome(token->offset, token->index, OUTCOME_UNKNOWN, HOW_UNKNOWN);
      } else if (!token->unknown) {
        older(token);
      }
    }
    return oldest;
  }

  // The record that closes a coalesced group, which Python has written.
  TokenPtr group_token(const py::object& described, const AskedPtr& first, uint64_t index, uint64_t offset, uint64_t since) {
    auto token = std::make_shared<Token>();
    auto asked = understood(described);
    asked->channel = first->channel;
    token->asked = asked;
    token->index = index;
    token->offset = offset;
    token->since = since;
    token->thread = this_thread();
    return token;
  }

  std::deque<TokenPtr> take_unpolled() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(unpolled_, {});
  }

  // How many Works are held, and outputs remembered.
  size_t held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return under_way_.held().size() + under_way_.pointers();
  }

  void release() {
    UnderWay old;
    std::deque<TokenPtr> unpolled;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(under_way_, old);
    unpolled_.swap(unpolled);
  }

  // --- groups

  void forget_group(const void* process_group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(process_group);
  }

  void forget_groups() {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.clear();
  }

  void renamed(PyObject* channel) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = channels_.find(channel);
    if (found != channels_.end()) found->second->blob = 0;
  }

  uint64_t channel_blob(Channel& channel) {
    if (channel.blob.load(std::memory_order_relaxed) <= box_.side_floor())
      channel.blob = host().attr("channel_blob")(py::handle(channel.python.get())).cast<uint64_t>();
    return channel.blob;
  }

  // With the GIL: the stack of the calling thread.
  uint64_t stack_position(int skip = 0) {
    if (cpp_stack_) return host().attr("native_stack")().cast<uint64_t>();
    return stacks_.position(box_.side_floor(), skip, [&] { return host().attr("python_stack")(skip).template cast<uint64_t>(); });
  }

  Box& box() { return box_; }
  bool timing() const { return timing_; }
  py::handle host() const { return host_; }

  void failed(const char* what) noexcept {
    try {
      if (!python_runs()) return;
      Gil gil;
      PyErrKeeper keep;
      host().attr("failed_natively")(what);
    } catch (const std::exception&) {  // whoever cannot even say so lets the job go on
    }
  }

  // An exception of the caller's stays set while Python code of ours runs.
  class PyErrKeeper {
   public:
    PyErrKeeper() { PyErr_Fetch(&type_, &value_, &trace_); }
    ~PyErrKeeper() { PyErr_Restore(type_, value_, trace_); }

   private:
    PyObject *type_, *value_, *trace_;
  };

 private:
  static constexpr uint64_t LOOSEN_AFTER_NS = 200000000;
  static constexpr size_t ASKED_LIMIT = 10000;

  TokenPtr announce(const OpSpec& spec, Arguments arguments, uint32_t entered) {
    const AskedPtr asked = find(spec, arguments);
    Channel& channel = *asked->channel;
    const uint32_t thread = this_thread();
    const uint64_t floor = box_.side_floor();
    const bool renew = asked->blob.load(std::memory_order_relaxed) <= floor && !asked->too_large.load(std::memory_order_relaxed);
    uint64_t stack = 0;
    // In a thread of C++'s own (autograd's, on an accelerator, where DDP issues its collectives) there is no Python to ask.
    const bool python = PyGILState_GetThisThreadState() != nullptr;
    if (python || cpp_stack_ || renew || channel.blob.load(std::memory_order_relaxed) <= floor) {
      if (!python_runs()) return nullptr;
      Gil gil;
      PyErrKeeper keep;
      if (renew) {
        asked->blob = host().attr("asked_blob")(py::handle(asked->python.get())).cast<uint64_t>();
        asked->too_large = asked->blob == 0;
      }
      channel_blob(channel);
      if (python || cpp_stack_) stack = stack_position();
    }
    auto token = std::make_shared<Token>();
    Record record{};
    record.flags = asked->flags | entered;
    const uint32_t busy = channel.busy.exchange(thread, std::memory_order_relaxed);
    if (busy && busy != thread) record.flags |= FLAG_CONCURRENT;
    if (coalescing_count_.load(std::memory_order_relaxed)) {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = coalescing_.find(thread);
      if (found != coalescing_.end()) {
        Coalescing& group = found->second;
        if (!group.members++) group.first = asked;
        if (!asked->point_to_point && !group.number) group.number = asked->number->fetch_add(1) + 1;
        record.sequence_number = asked->point_to_point ? asked->number->fetch_add(1) + 1 : group.number;
        record.coalescing_id = group.id;
        record.flags |= FLAG_COALESCED_MEMBER;
        token->coalesced = true;
      }
    }
    if (!token->coalesced) record.sequence_number = asked->number->fetch_add(1, std::memory_order_relaxed) + 1;
    record.index = box_.next_index();
    record.announced = now_ns();
    record.group = channel.blob.load(std::memory_order_relaxed);
    record.asked = asked->blob.load(std::memory_order_relaxed);
    record.stack = stack;
    record.step = box_.steps();
    record.tag = asked->tag;
    record.thread = thread;
    record.peer = asked->peer;
    token->index = record.index;
    token->since = record.announced;
    token->thread = thread;
    token->stack = stack;
    token->offset = box_.announce(record);
    token->number = record.sequence_number;
    if (asked->tagged) token->tagged_number = asked->tagged->fetch_add(1) + 1;
    token->asked = asked;
    if (!token->coalesced && !asked->synchronous && channel.polls) {
      const auto& where = spec.writes.empty() ? spec.tensors : spec.writes;
      if (!where.empty()) add_pointers(arguments[where[0]], token->pointers);
    }
    if (spec.reduce_op >= 0) {
      const auto code = reduce_op_code(arguments[spec.reduce_op]);
      if (code >= 0) box_.mark_value(token->offset, REDUCE_OP, token->index, static_cast<uint64_t>(code) + 1);
    }
    return token;
  }

  static int reduce_op_code(const c10::IValue& value) {
    const auto* held = boxed<c10d::ReduceOp>(value);
    return held ? static_cast<int>(held->op_) : -1;
  }

  AskedPtr find(const OpSpec& spec, Arguments arguments) {
    thread_local Words key;
    key.clear();
    auto* process_group = boxed<c10d::ProcessGroup>(arguments[spec.process_group]);
    TORCH_CHECK(process_group, "an op without a process group");
    key.push_back(0);  // the group
    key.push_back(spec.number);
    for (const int at : spec.words) add_value(arguments[at], key);
    for (const int at : spec.tensors) add_value(arguments[at], key);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto group = groups_.find(process_group);
      if (group != groups_.end()) {
        key[0] = group->second;
        if (AskedPtr* found = asked_.find(key, hash_of(key))) return *found;
      }
    }
    return ask(spec, arguments, process_group, key);
  }

  // An Asked of Python's, with the GIL.
  static AskedPtr understood(const py::object& described) {
    auto asked = std::make_shared<Asked>();
    asked->python = PyRef::of(described.ptr());
    asked->peer = described.attr("peer").cast<int32_t>();
    asked->tag = described.attr("tag").cast<int64_t>();
    asked->flags = described.attr("flags").cast<uint32_t>();
    asked->synchronous = described.attr("synchronous").cast<bool>();
    asked->wait_tells = described.attr("wait_tells").cast<bool>();
    const auto op = described.attr("op").cast<std::string>();
    asked->point_to_point = op == "send" || op == "recv";
    return asked;
  }

  // Seen for the first time: Python describes it.
  AskedPtr ask(const OpSpec& spec, Arguments arguments, c10d::ProcessGroup* process_group, Words key) {
    TORCH_CHECK(python_runs(), "Python has ended");
    Gil gil;
    PyErrKeeper keep;
    py::tuple values(spec.arguments);
    for (size_t i = 0; i < spec.arguments; ++i) values[i] = torch::jit::toPyObject(arguments[i]);
    py::object described = host().attr("ask")(spec.name, values, reinterpret_cast<uintptr_t>(process_group));
    AskedPtr asked = understood(described);
    const bool sends = described.attr("op").cast<std::string>() == "send";
    py::object channel = described.attr("channel");
    const bool polls = channel.attr("polls").cast<bool>();
    WordTable<AskedPtr> old;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& ours = channels_[channel.ptr()];
    if (!ours) {
      ours = std::make_unique<Channel>();
      ours->python = PyRef::of(channel.ptr());
      ours->polls = polls;
    }
    asked->channel = ours.get();
    asked->number = asked->point_to_point ? &ours->pairs[{asked->peer, sends, false, 0}] : &ours->numbers;
    if (asked->point_to_point && polls) asked->tagged = &ours->pairs[{asked->peer, sends, true, asked->tag}];
    auto& group = groups_[process_group];
    if (!group) group = ++group_ids_;
    key[0] = group;
    const uint64_t hash = hash_of(key);
    if (AskedPtr* found = asked_.find(key, hash)) return *found;  // two threads met here
    if (asked_.size() >= ASKED_LIMIT) asked_.swap(old);
    asked_.put(std::move(key), hash, asked);
    return asked;
  }

  void verify(const OpSpec& spec, Arguments arguments, const TokenPtr& token) {
    if (!python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    const int code = spec.reduce_op >= 0 ? reduce_op_code(arguments[spec.reduce_op]) : -1;
    PyObject* answer = PyObject_CallMethod(
        host().ptr(), "verify_natively", "OKKKIKKKi", token->asked->python.get(), static_cast<unsigned long long>(token->index),
        static_cast<unsigned long long>(token->offset), static_cast<unsigned long long>(token->since), token->thread,
        static_cast<unsigned long long>(token->number), static_cast<unsigned long long>(token->tagged_number),
        static_cast<unsigned long long>(token->stack), code);
    if (!answer) {
      token->asked->channel->busy.store(0, std::memory_order_relaxed);
      give_number_back(*token);
      throw_python_error();
    }
    token->verified = PyRef::of(answer);
    Py_DECREF(answer);
  }

  void wait_marks(Token& token) {
    token.waiting = true;
    box_.wait_began(token.offset, token.index, now_ns(), this_thread(), token.asked->synchronous);
  }

  void hold(const TokenPtr& token) {
    TokenPtr oldest;
    bool full = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      oldest = under_way_.oldest();
      full = under_way_.full();
    }
    // Amortised: each new collective looks at the oldest one, so that no Work (and no tensor) is held for long.
    if (oldest) {
      if (!oldest->asked->wait_tells && is_completed(oldest))
        completed(oldest);
      else if (full)
        give_up(oldest);
    }
    std::vector<TokenPtr> dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    under_way_.hold(token, dropped);
  }

  static bool is_completed(const TokenPtr& token) { return token->work->isCompleted(); }

  // Too many are held, of a kind that nobody waits for: the state of this one cannot be known any more.
  void give_up(const TokenPtr& token) {
    if (token->asked->wait_tells) {
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
    }
    if (ours) {
      token->unknown = true;
      box_.mark_outcome(token->offset, token->index, OUTCOME_UNKNOWN, HOW_UNKNOWN);
    }
  }

  void completed(const TokenPtr& token) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!under_way_.let_go(token)) return;
      under_way_.forget_pointers(token);
    }
    if (has_error(*token->work) && python_runs()) {
      Gil gil;
      PyErrKeeper keep;
      py::object error = host().attr("error_of")(py::cast(token->work));
      if (!error.is_none()) {
        host().attr("mark_failed")(token->offset, token->index, error, 0, HOW_POLL);
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
  Coalescing take_coalescing(uint32_t thread) {
    auto found = coalescing_.find(thread);
    if (found == coalescing_.end()) return {};
    Coalescing group = std::move(found->second);
    coalescing_.erase(found);
    coalescing_count_.fetch_sub(1);
    return group;
  }

  Box& box_;
  PyObject* const host_;  // commlens.capture.native_recorder.NativeRecorder; kept for ever
  const bool cpp_stack_, timing_;
  // While it is held, no GIL is taken, and no Work, tensor or Python object dropped: what goes is moved to a local that was
  // declared before the lock.
  std::mutex mutex_;
  std::unordered_map<const void*, uint64_t> groups_;
  uint64_t group_ids_ = 0;
  WordTable<AskedPtr> asked_;
  std::unordered_map<PyObject*, std::unique_ptr<Channel>> channels_;  // kept for ever: there are few
  UnderWay under_way_;
  std::deque<TokenPtr> unpolled_;  // on an accelerator
  std::unordered_map<uint32_t, Coalescing> coalescing_;
  std::atomic<uint64_t> coalescing_count_{0}, coalescing_ids_{0};
  Stacks stacks_;  // under the GIL
};

}  // namespace commlens
