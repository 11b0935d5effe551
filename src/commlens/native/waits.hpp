// Work.wait: which thread is blocked in which collective, and when it is done.
#pragma once

#include "kernels.hpp"

namespace commlens {

// The address of a Python object's Work, for comparison only; cheaper than pybind11's cast. Null if the object is not a Work, or has no
// simple layout.
inline const void* address_of(PyObject* object) {
  static std::atomic<PyTypeObject*> last{nullptr};  // a class of Works; kept forever
  PyTypeObject* type = Py_TYPE(object);
  if (type != last.load(std::memory_order_acquire)) {
    if (!py::isinstance<c10d::Work>(py::handle(object))) return nullptr;
    Py_INCREF(type);
    last.store(type, std::memory_order_release);
  }
  const auto* instance = reinterpret_cast<const py::detail::instance*>(object);
  return instance->simple_layout ? instance->simple_value_holder[0] : nullptr;
}

// The method of a class of Works. `closure` holds the original method and its wrapper in Python, which is called while Python
// listens to waits.
inline PyObject* wait(PyObject* closure, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyObject* original = PyTuple_GET_ITEM(closure, 0);
  if (python_waits.load(std::memory_order_relaxed)) return PyObject_Vectorcall(PyTuple_GET_ITEM(closure, 1), arguments, count, names);
  Recorder* recorder = active.load(std::memory_order_acquire);
  TokenPtr token;
  if (recorder && count > 0) {
    try {
      const void* work = address_of(arguments[0]);
      token = recorder->completion.caller_wait_begins(work);
      if (!token) token = recorder->completion.wait_begins(work ? work : py::cast<c10d::Work*>(py::handle(arguments[0])), arguments[0]);
    } catch (const std::exception& error) {
      if (restore_interrupt()) return nullptr;
      recorder->failed(error.what());
    }
    try {
      recorder->verification.before_wait(token);
    } catch (python_error& refused) {
      refused.restore();
      return nullptr;
    }
  }
  PyObject* result = PyObject_Vectorcall(original, arguments, count, names);
  if (!token) return result;
  try {
    if (result) {
      const bool any_source = token->args->flags & FLAG_ANY_SOURCE;
      recorder->completion.wait_ended(token, nullptr, any_source ? py::cast<c10d::Work*>(py::handle(arguments[0])) : nullptr);
    } else {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      PyErr_NormalizeException(&type, &value, &trace);
      const auto raised = py::reinterpret_borrow<py::object>(value);
      try {
        recorder->completion.wait_ended(token, &raised);
      } catch (const std::exception& error) {
        if (restore_interrupt()) {
          Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
          return nullptr;
        }
        recorder->failed(error.what());
      }
      PyErr_Restore(type, value, trace);
      recorder->verification.set_error_to_raise(raised);
    }
  } catch (const std::exception& error) {
    if (restore_interrupt()) {
      Py_XDECREF(result);
      return nullptr;
    }
    recorder->failed(error.what());
  }
  return result;
}

inline py::object tapped_wait(const py::object& original, const py::object& slow) {
  static PyMethodDef method = {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&wait)), METH_FASTCALL | METH_KEYWORDS,
                               "Wait until the collective is done."};
  // pybind11 wraps a class's function so that it binds; here the bare function is enough.
  PyObject* bare = PyInstanceMethod_Check(original.ptr()) ? PyInstanceMethod_GET_FUNCTION(original.ptr()) : original.ptr();
  const py::tuple closure = py::make_tuple(py::reinterpret_borrow<py::object>(bare), slow);
  const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&method, closure.ptr()));
  if (!function) throw py::error_already_set();
  auto bound = py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
  if (!bound) throw py::error_already_set();
  return bound;
}

}  // namespace commlens
