// Strict verification between the tap and what compares: by plan where there is one, else by the host's verifier in Python, which
// makes the plans.
#pragma once

#include "exchange.hpp"
#include "host.hpp"
#include "threads.hpp"
#include "tokens.hpp"

namespace commlens {

namespace py = pybind11;

class Verification {
 public:
  explicit Verification(const Host& host) : host_(host) {}

  // By which it is done; null: collectives are not verified.
  void use(Exchange* exchange) { exchange_.store(exchange, std::memory_order_release); }
  bool is_on() const { return exchange_.load(std::memory_order_relaxed) != nullptr; }

  // Compares an op with the peers'. Throws what a verifier raises: then it must not be issued.
  void before_issue(const TokenPtr& token, int reduce_op) {
    Exchange* const exchange = exchange_.load(std::memory_order_acquire);
    if (!exchange || !exchange->is_active()) return;
    InternedArgs& args = *token->args;
    thread_local const Exchange* knows_this_thread = nullptr;  // the verifier in Python counts threads: each comes there first
    PlanPtr plan = knows_this_thread == exchange ? exchange->plan(args.plans, token->stack, reduce_op) : nullptr;
    if (plan) {
      Answer answer = exchange->announce(token->announced, std::move(plan), token->tagged_number ? token->tagged_number : token->number);
      if (answer == Answer::WAIT) {
        NoGil no_gil;
        answer = exchange->wait(token->announced, true, token->thread);
      }
      if (answer != Answer::ASK) return;
    }
    if (!python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    token->verified = ask("verify_before_issue", py::make_tuple(token, reduce_op));
    knows_this_thread = exchange;
    if (token->announced.plan || args.never_planned) return;
    const PyRef planned = ask("make_plan", py::make_tuple(py::handle(args.python.get()), token->stack, reduce_op));
    if (planned.get() == Py_None)
      args.never_planned = true;
    else
      exchange->put(args.plans, token->stack, reduce_op, py::handle(planned.get()).cast<std::shared_ptr<Plan>>());
  }

  // The backend has it. With the GIL.
  void issued(const Token& token) {
    if (token.verified) host_.call("after_verified_issue", py::handle(token.verified.get()));
  }

  // It was not issued after all: nobody is to meet its announcement. With the GIL.
  void not_issued(const Token& token) {
    if (token.verified)
      host_.call("withdraw", py::handle(token.verified.get()));
    else if (token.announced.plan)
      exchange_.load(std::memory_order_acquire)->withdraw(token.announced);
  }

  // A thread is about to block until this op (null: one that nobody knows) is done. Throws what a verifier raises.
  void before_wait(const TokenPtr& token) {
    Exchange* const exchange = exchange_.load(std::memory_order_acquire);
    if (!exchange || !exchange->is_active()) return;
    if (!token || !token->verified) {
      if (!token || token->announced.absent.empty()) {
        if (!exchange->is_alarmed()) return;
      } else {
        Answer answer = exchange->before_wait(token->announced);
        if (answer == Answer::WAIT) {
          NoGil no_gil;
          answer = exchange->wait(token->announced, false, this_thread());
        }
        if (answer != Answer::ASK) return;
      }
    }
    if (!python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    ask("verify_before_wait", py::make_tuple(token));
  }

  // Python's error that a wait in the backend ended with is set. Where a peer refused and ended, its refusal says why, and is set
  // instead.
  void raise_rather(const py::object& error) {
    if (!is_on()) return;
    PyObject* refused = nullptr;
    {
      PyErrKeeper keep;
      refused = PyObject_CallMethod(host_.get(), "error_to_raise", "O", error.ptr());
      if (!refused) PyErr_Clear();
    }
    if (refused && refused != error.ptr()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(refused)), refused);
    Py_XDECREF(refused);
  }

  // The same for an error in flight in C++: returns where that is the one to throw.
  void throw_rather(const std::exception_ptr& error) {
    if (!is_on() || !python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    const py::object raised = as_python(error);
    const PyRef rather = ask("error_to_raise", py::make_tuple(raised));
    if (rather.get() == raised.ptr()) return;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(rather.get())), rather.get());
    throw_python_error();
  }

 private:
  // What the host raises is thrown so that the caller's thread may take it anywhere. With the GIL.
  PyRef ask(const char* method, const py::tuple& arguments) const {
    return taken(PyObject_CallObject(py::object(py::handle(host_.get()).attr(method)).ptr(), arguments.ptr()));
  }

  const Host& host_;
  std::atomic<Exchange*> exchange_{nullptr};
};

}  // namespace commlens
