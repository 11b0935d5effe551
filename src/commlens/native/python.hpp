// What the tap needs of Python: the GIL, owned references, and errors that pass through C++.
#pragma once

#include <Python.h>

#include <ATen/core/ivalue.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>
#include <utility>

namespace torch::jit {
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);  // its own header brings the whole of TorchScript
}

namespace commlens {

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Releases the GIL, if this thread has it.
class NoGil {
 public:
  NoGil() : state_(PyGILState_GetThisThreadState() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~NoGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* const state_;
};

inline bool python_runs() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

// An owned reference. Dropping it takes the GIL, so it must not be dropped under the recorder's mutex.
class PyRef {
 public:
  PyRef() = default;
  static PyRef of(PyObject* borrowed) {
    PyRef ref;
    ref.object_ = Py_XNewRef(borrowed);
    return ref;
  }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  ~PyRef() {
    if (object_ && python_runs()) {
      Gil gil;
      Py_DECREF(object_);
    }
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Preserves the caller's exception while Python code of ours runs. With the GIL.
class PyErrKeeper {
 public:
  PyErrKeeper() { PyErr_Fetch(&type_, &value_, &trace_); }
  ~PyErrKeeper() { PyErr_Restore(type_, value_, trace_); }
  PyErrKeeper(const PyErrKeeper&) = delete;
  PyErrKeeper& operator=(const PyErrKeeper&) = delete;

 private:
  PyObject *type_, *value_, *trace_;
};

// Throws the error that Python raised, in a form that may leave this thread and the GIL.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Returns the result of a Python call, or throws its error. With the GIL.
inline PyRef checked(PyObject* result) {
  if (!result) throw_python_error();
  PyRef kept = PyRef::of(result);
  Py_DECREF(result);
  return kept;
}

// Converts a C++ exception to a Python one; never null. With the GIL.
inline pybind11::object as_python(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (pybind11::error_already_set& raised) {  // to restore the error would empty it
    return raised.value() ? pybind11::reinterpret_borrow<pybind11::object>(raised.value()) : pybind11::none();
  } catch (...) {
  }
  torch::translate_exception_to_python(error);
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return value ? pybind11::reinterpret_steal<pybind11::object>(value) : pybind11::none();
}

// In a catch block: the exception that is being handled, if it ends the program and is no error, else null. Python runs the handlers of
// signals in whatever Python code runs, so KeyboardInterrupt and SystemExit may rise in ours; they are the program's.
inline PyRef interrupt_in_flight() {
  try {
    throw;
  } catch (pybind11::error_already_set& raised) {
    if (!python_runs()) return {};
    Gil gil;
    return raised.matches(PyExc_Exception) ? PyRef() : PyRef::of(raised.value().ptr());
  } catch (...) {
    return {};
  }
}

// In a catch block: makes such an exception Python's current error. Returns whether there was one. With the GIL.
inline bool restore_interrupt() {
  const PyRef interrupt = interrupt_in_flight();
  if (interrupt) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.get())), interrupt.get());
  return static_cast<bool>(interrupt);
}

// In a catch block: throws such an exception on.
inline void pass_on_interrupt() {
  if (!python_runs()) return;
  Gil gil;
  if (restore_interrupt()) throw_python_error();
}

}  // namespace commlens
