// The hot path of the recorder. commlens/capture/recorder.py does the same in Python and writes the same records. The host, in Python, does
// the rare work.
#pragma once

#include "coalescing.hpp"
#include "completion.hpp"
#include "args_table.hpp"
#include "stacks.hpp"
#include "verification.hpp"

namespace commlens {

class Recorder {
  Box& box_;
  const Host host_;
  const bool cpp_stack_;

 public:
  Recorder(Box& box, py::object host, bool cpp_stack, bool timing)
      : box_(box), host_(std::move(host)), cpp_stack_(cpp_stack), args_table(box, host_), completion(box, host_, timing), verification(host_) {}

  ArgsTable args_table;
  CoalescedGroups coalesced_groups;
  Completion completion;
  Verification verification;
  std::atomic<bool> capturing{false};  // a CUDA graph is being captured

  // --- the tap's calls

  // Writes the record before the backend sees the op. Throws only a verifier's refusal, and as all methods here what a signal's handler raised.
  TokenPtr begin(const OpSpec& spec, Arguments arguments) {
    const bool verified = verification.is_on();
    TokenPtr token;
    try {
      token = announce(spec, arguments, verified ? 0 : FLAG_ENTERED);
    } catch (const std::exception& error) {
      pass_on_interrupt();
      failed(error.what());
      return nullptr;
    }
    if (verified && token && !token->coalesced) {
      verify(spec, arguments, token);
      box_.mark(token->offset, ENTERED, token->index, now_ns());
    }
    return token;
  }

  // The backend accepted it. `result` is its Work; null if the call waited for it.
  void returned(const TokenPtr& token, const c10::IValue* result) {
    try {
      token->args->channel->busy.store(0, std::memory_order_relaxed);
      if (token->verified && python_runs()) {
        Gil gil;
        PyErrKeeper keep;
        verification.issued(*token);
      }
      auto* work = result ? boxed<c10d::Work>(*result) : nullptr;
      if (token->args->synchronous && work)
        completion.hold_for_caller(token, work);
      else if (token->coalesced)
        completion.mark_unknown(*token);  // the record that closes the group carries the state of all its members
      else
        completion.returned(token, work ? WorkPtr::reclaim_copy(work) : WorkPtr());
    } catch (const std::exception& error) {
      completion.mark_unknown(*token);
      pass_on_interrupt();
      failed(error.what());
    }
  }

  // The backend's call raised: it refused the op, or timed out inside.
  void raised(const TokenPtr& token, const std::exception_ptr& error) {
    try {
      Gil gil;
      PyErrKeeper keep;
      record_error(token, as_python(error));
    } catch (const std::exception& ours) {
      completion.mark_unknown(*token);
      pass_on_interrupt();
      failed(ours.what());
    }
  }

  // The token of the record that closes a coalesced group, which Python has written.
  TokenPtr group_token(const py::object& described, const ArgsPtr& first, uint64_t index, uint64_t offset, uint64_t since, uint64_t number) {
    auto token = std::make_shared<Token>();
    auto args = from_python(described);
    args->channel = first->channel;
    token->args = args;
    token->index = index;
    token->offset = offset;
    token->since = since;
    token->thread = this_thread();
    token->number = number;
    token->captured = args->channel->runs_ahead && capturing.load(std::memory_order_relaxed);
    return token;
  }

  // The position of the calling thread's stack, without its `skip` innermost frames, joined with the stack that called backward(), if
  // autograd made the calling thread. 0 if there are no frames: of DDP's collectives on an accelerator, there are only the joined ones.
  uint64_t stack_position(int skip = 0) {
    if (cpp_stack_) {
      if (!python_runs()) return 0;
      Gil gil;
      PyErrKeeper keep;
      return host_.call("native_stack").cast<uint64_t>();
    }
    const uint64_t caller = backward_caller();
    PyThreadState* thread = PyGILState_GetThisThreadState();
    if (!thread && !caller) return 0;
    return stacks_.position(thread, caller, box_.side_floor(), skip,
                            [&] { return host_.call("python_stack", skip, caller).template cast<uint64_t>(); });
  }

  void failed(const char* text) noexcept { host_.failed(text); }

 private:
  TokenPtr announce(const OpSpec& spec, Arguments arguments, uint32_t entered) {
    const ArgsPtr args = args_table.find(spec, arguments);
    Channel& channel = *args->channel;
    const uint32_t thread = this_thread();
    if (!args_table.described(*args)) {
      if (!python_runs()) return nullptr;
      Gil gil;
      PyErrKeeper keep;
      args_table.describe(*args);
    }
    const uint64_t stack = stack_position();
    auto token = std::make_shared<Token>();
    Record record{};
    record.flags = args->flags | entered;
    const uint32_t busy = channel.busy.exchange(thread, std::memory_order_relaxed);
    if (busy && busy != thread) record.flags |= FLAG_CONCURRENT;
    if (channel.runs_ahead && capturing.load(std::memory_order_relaxed)) {
      record.flags |= FLAG_CAPTURE;
      token->captured = true;
    }
    token->coalesced = coalesced_groups.join(args, record);
    if (!token->coalesced) record.sequence_number = args->number->fetch_add(1, std::memory_order_relaxed) + 1;
    record.index = box_.next_index();
    record.announced = now_ns();
    record.group = channel.blob.load(std::memory_order_relaxed);
    record.asked = args->blob.load(std::memory_order_relaxed);
    record.stack = stack;
    record.step = box_.steps();
    record.tag = args->tag;
    record.thread = thread;
    record.peer = args->peer;
    token->index = record.index;
    token->since = record.announced;
    token->thread = thread;
    token->stack = stack;
    token->offset = box_.announce(record);
    token->number = record.sequence_number;
    if (args->tagged) token->tagged_number = args->tagged->fetch_add(1) + 1;
    token->args = args;
    if (!token->coalesced && !args->synchronous && !channel.runs_ahead) {
      const auto& where = spec.writes.empty() ? spec.tensors : spec.writes;
      if (!where.empty()) add_pointers(arguments[where[0]], token->pointers);
    }
    if (spec.reduce_op >= 0) {
      const auto code = reduce_op_code(arguments[spec.reduce_op]);
      if (code >= 0) box_.mark_value(token->offset, REDUCE_OP, token->index, static_cast<uint64_t>(code) + 1);
    }
    return token;
  }

  // The number of the stack that called the backward pass which this thread runs for another thread; 0 for none. Python finds it, once in
  // each pass: waiting for the GIL for each collective would delay communication.
  uint64_t backward_caller() {
    thread_local bool never = false;
    thread_local int known_run = NO_RUN;
    thread_local uint64_t caller = 0;
    if (never) return 0;
    const int run = torch::autograd::get_current_graph_task_id();
    if (run == NO_RUN || !python_runs()) return 0;
    if (run != known_run) {
      Gil gil;
      PyErrKeeper keep;
      const int64_t found = host_.call("backward_caller").cast<int64_t>();
      never = found < 0;
      caller = never ? 0 : static_cast<uint64_t>(found);
      known_run = run;
    }
    return caller;
  }

  static int reduce_op_code(const c10::IValue& value) {
    const auto* held = boxed<c10d::ReduceOp>(value);
    return held ? static_cast<int>(held->op_) : -1;
  }

  void verify(const OpSpec& spec, Arguments arguments, const TokenPtr& token) {
    try {
      verification.before_issue(token, spec.reduce_op >= 0 ? reduce_op_code(arguments[spec.reduce_op]) : -1);
    } catch (...) {
      token->args->channel->busy.store(0, std::memory_order_relaxed);
      give_number_back(*token);
      throw;
    }
  }

  void record_error(const TokenPtr& token, const py::object& error) {
    token->args->channel->busy.store(0, std::memory_order_relaxed);
    bool freed = false;
    if (!token->coalesced && host_.call("was_not_issued", py::handle(token->args->python.get()), error).cast<bool>()) {
      verification.not_issued(*token);
      freed = give_number_back(*token);
    }
    if (token->coalesced) coalesced_groups.take(token->thread);  // nothing will close the group now
    host_.mark_failed(token->offset, token->index, error, 0, HOW_RETURN);
    if (freed) host_.call("forget_number", token->offset, token->index);
  }

  // Frees the number of an op that was not issued for the next one of its channel; false if another thread has drawn one since.
  static bool give_number_back(const Token& token) {
    if (token.coalesced || !token.number) return false;
    uint64_t tagged = token.tagged_number, number = token.number;
    if (tagged && token.args->tagged) token.args->tagged->compare_exchange_strong(tagged, tagged - 1);
    return token.args->number->compare_exchange_strong(number, number - 1);
  }

  static constexpr int NO_RUN = -1;
  Stacks stacks_;
};

}  // namespace commlens
