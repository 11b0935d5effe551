// The dispatcher's kernels, through which every collective of the process passes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <vector>

#include "recorder.hpp"

namespace commlens {

inline std::atomic<Recorder*> active{nullptr};
inline std::atomic<bool> python_subscribes{false}, python_waits{false};
inline std::atomic<uint64_t> fake_keys{0};  // the keyset for collectives on fake and meta tensors; 0 leaves them to torch
inline PyObject* python_tap = nullptr;  // the module commlens.tap.tap; kept forever

// Call a function of that module. With the GIL.
inline PyRef call_python_tap(const char* name, PyObject* first, PyObject* second = nullptr, PyObject* third = nullptr) {
  py::object function = py::handle(python_tap).attr(name);
  return checked(PyObject_CallFunctionObjArgs(function.ptr(), first, second, third, nullptr));
}

const c10::DispatchKeySet below_us(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// Whether the tensors are fake or meta: nothing is communicated.
inline bool is_fake(c10::DispatchKeySet keys) { return keys.has(c10::DispatchKey::Meta); }

inline c10::DispatchKeySet keys_below(c10::DispatchKeySet keys) {
  const uint64_t fake = fake_keys.load(std::memory_order_relaxed);
  return fake && is_fake(keys) ? c10::DispatchKeySet(c10::DispatchKeySet::RAW, fake) : keys & below_us;
}

class Tap : public c10::OperatorKernel {
 public:
  Tap(OpSpec spec, PyObject* python_spec) : spec_(std::move(spec)), python_spec_(python_spec) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    const bool fake = is_fake(keys);
    Recorder* recorder = fake ? nullptr : active.load(std::memory_order_acquire);
    const bool slow = python_subscribes.load(std::memory_order_relaxed) && (!fake || fake_keys.load(std::memory_order_relaxed)) && python_runs();
    if (!recorder && !slow) {
      op.redispatchBoxed(keys_below(keys), stack);
      return;
    }
    const size_t results_at = stack->size() - spec_.arguments;
    TokenPtr token = recorder ? recorder->begin(spec_, stack->data() + results_at) : nullptr;
    PyRef tokens;
    try {
      if (slow) tokens = report_begin(stack->data() + results_at, fake);
      op.redispatchBoxed(keys_below(keys), stack);
    } catch (...) {
      const auto error = std::current_exception();
      if (token) recorder->raised(token, error);
      if (tokens) report_raised(tokens, error);
      throw;
    }
    if (token) recorder->returned(token, spec_.results ? &stack->back() : nullptr);
    if (tokens) report_returned(tokens, *stack, results_at);
  }

 private:
  // --- reports to subscribers in Python (a tracer), through commlens.tap.tap

  PyRef report_begin(Arguments arguments, bool fake) {
    Gil gil;
    py::tuple values(spec_.arguments);
    for (size_t i = 0; i < spec_.arguments; ++i) values[i] = torch::jit::toPyObject(arguments[i]);
    return call_python_tap("begin_all", python_spec_, values.ptr(), fake ? Py_True : Py_False);
  }

  void report_returned(const PyRef& tokens, const c10::Stack& stack, size_t at) {
    Gil gil;
    py::object result = py::none();
    if (spec_.results == 1) {
      result = torch::jit::toPyObject(stack[at]);
    } else if (spec_.results > 1) {
      py::tuple values(spec_.results);
      for (size_t i = 0; i < spec_.results; ++i) values[i] = torch::jit::toPyObject(stack[at + i]);
      result = values;
    }
    call_python_tap("returned_all", tokens.get(), result.ptr());
  }

  static void report_raised(const PyRef& tokens, const std::exception_ptr& error) {
    Gil gil;
    call_python_tap("raised_all", tokens.get(), as_python(error).ptr());
  }

  const OpSpec spec_;
  PyObject* const python_spec_;
};

// _c10d_functional::wait_tensor.
class TensorWait : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    Recorder* recorder = is_fake(keys) ? nullptr : active.load(std::memory_order_acquire);
    const bool slow = !is_fake(keys) && python_waits.load(std::memory_order_relaxed) && python_runs();
    if (slow) {
      wait_in_python(op, keys, stack);
      return;
    }
    TokenPtr token = recorder ? begin(*recorder, stack->back()) : nullptr;
    if (recorder) recorder->verification.before_wait(token);
    if (!token && !(recorder && recorder->verification.is_on())) {
      op.redispatchBoxed(keys_below(keys), stack);
      return;
    }
    try {
      op.redispatchBoxed(keys_below(keys), stack);
    } catch (...) {
      const auto error = std::current_exception();
      if (token) end(*recorder, token, error);
      recorder->verification.throw_refusal(error);
      throw;
    }
    if (token) end(*recorder, token, nullptr);
  }

 private:
  static TokenPtr begin(Recorder& recorder, const c10::IValue& tensor) {
    try {
      return recorder.completion.tensor_wait_begins(tensor.toTensor());
    } catch (const std::exception& error) {
      pass_on_interrupt();
      recorder.failed(error.what());
      return nullptr;
    }
  }

  static void end(Recorder& recorder, const TokenPtr& token, const std::exception_ptr& error) {
    try {
      if (!error) {
        recorder.completion.wait_ended(token, nullptr);
      } else if (python_runs()) {
        Gil gil;
        PyErrKeeper keep;
        const py::object raised = as_python(error);
        recorder.completion.wait_ended(token, &raised);
      }
    } catch (const std::exception& ours) {
      pass_on_interrupt();
      recorder.failed(ours.what());
    }
  }

  // Reports the wait to a tracer in Python. It may raise a verifier's refusal instead of the backend's error.
  static void wait_in_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::Stack* stack) {
    PyRef tokens;
    {
      Gil gil;
      py::object tensor = torch::jit::toPyObject(stack->back());
      tokens = call_python_tap("wait_begins", tensor.ptr());
    }
    std::exception_ptr error;
    try {
      op.redispatchBoxed(keys_below(keys), stack);
    } catch (...) {
      error = std::current_exception();
    }
    if (tokens.get() != Py_None) {
      Gil gil;
      py::object raised = error ? as_python(error) : py::none();
      call_python_tap("wait_ended", tokens.get(), raised.ptr());
    }
    if (error) std::rethrow_exception(error);
  }
};

// Registers the kernels. They stay registered, since a thread may be inside one when it is removed.
inline void install(std::vector<OpSpec> specs, const py::list& python_specs, const py::object& slow) {
  python_tap = py::object(slow).release().ptr();
  static auto* collectives = new torch::Library(torch::Library::IMPL, "c10d", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  for (auto& spec : specs) {
    const std::string name = spec.name;
    PyObject* python_spec = py::object(python_specs[spec.number]).release().ptr();
    collectives->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Tap>(std::move(spec), python_spec)));
  }
  static auto* waits = new torch::Library(torch::Library::IMPL, "_c10d_functional", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
  waits->impl("wait_tensor", torch::CppFunction::makeFromBoxedFunctor(std::make_unique<TensorWait>()));
}

}  // namespace commlens
