// Strict verification of the recorder's collectives: by plan if there is one, else by the verifier in Python, which makes the plans.
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

  // The exchange to verify with; null if collectives are not verified.
  void use(Exchange* exchange) { exchange_.store(exchange, std::memory_order_release); }
  bool is_on() const { return exchange_.load(std::memory_order_relaxed) != nullptr; }

  // Compares an op with the peers'. Throws the verifier's refusal; then the op must not be issued.
  void before_issue(const TokenPtr& token, int reduce_op) {
    Exchange* const exchange = exchange_.load(std::memory_order_acquire);
    if (!exchange || !exchange->is_active()) return;
    InternedArgs& args = *token->args;
    thread_local const Exchange* known_to = nullptr;  // the verifier in Python counts threads, so each goes there first
    PlanPtr plan = known_to == exchange ? exchange->plan(args.plans, token->stack, reduce_op) : nullptr;
    if (plan) {
      Answer answer = exchange->announce(token->announced, std::move(plan), token->tagged_number ? token->tagged_number : token->number);
      if (answer == Answer::WAIT) {
        NoGil no_gil;
        answer = exchange->wait(token->announced, true, token->thread);
      }
      if (answer != Answer::ASK_PYTHON) return;
    }
    if (!python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    token->verified = call_host("verify_before_issue", py::make_tuple(token, reduce_op));
    known_to = exchange;
    if (token->announced.plan || args.never_planned) return;
    const PyRef planned = call_host("make_plan", py::make_tuple(py::handle(args.python.get()), token->stack, reduce_op));
    if (planned.get() == Py_None)
      args.never_planned = true;
    else
      exchange->put(args.plans, token->stack, reduce_op, py::handle(planned.get()).cast<std::shared_ptr<Plan>>());
  }

  // The backend accepted the op. With the GIL.
  void issued(const Token& token) {
    if (token.verified) host_.call("after_verified_issue", py::handle(token.verified.get()));
  }

  // Takes back the announcement of an op that was not issued. With the GIL.
  void not_issued(const Token& token) {
    if (token.verified)
      host_.call("withdraw", py::handle(token.verified.get()));
    else if (token.announced.plan)
      exchange_.load(std::memory_order_acquire)->withdraw(token.announced);
  }

  // Before a thread blocks until this op is done; null for a Work without a record. Throws the verifier's refusal.
  void before_wait(const TokenPtr& token) {
    Exchange* const exchange = exchange_.load(std::memory_order_acquire);
    if (!exchange || !exchange->is_active()) return;
    if (!token || !token->verified) {
      if (!token || token->announced.absent.empty()) {
        if (!exchange->has_unseen_refusal()) return;
      } else {
        Answer answer = exchange->before_wait(token->announced);
        if (answer == Answer::WAIT) {
          NoGil no_gil;
          answer = exchange->wait(token->announced, false, this_thread());
        }
        if (answer != Answer::ASK_PYTHON) return;
      }
    }
    if (!python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    call_host("verify_before_wait", py::make_tuple(token));
  }

  // Replaces the Python error that is set after a failed wait by the refusal of a peer, if there is one, since it names the cause.
  void set_error_to_raise(const py::object& error) {
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

  // The same for a C++ exception: throws the refusal, or returns if there is none.
  void throw_refusal(const std::exception_ptr& error) {
    if (!is_on() || !python_runs()) return;
    Gil gil;
    PyErrKeeper keep;
    const py::object raised = as_python(error);
    const PyRef chosen = call_host("error_to_raise", py::make_tuple(raised));
    if (chosen.get() == raised.ptr()) return;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(chosen.get())), chosen.get());
    throw_python_error();
  }

 private:
  // Calls the host, and throws its error in a form that may leave this thread. With the GIL.
  PyRef call_host(const char* method, const py::tuple& arguments) const {
    return checked(PyObject_CallObject(py::object(py::handle(host_.get()).attr(method)).ptr(), arguments.ptr()));
  }

  const Host& host_;
  std::atomic<Exchange*> exchange_{nullptr};
};

}  // namespace commlens
