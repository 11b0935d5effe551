// What a tracer reads of the Python frames of the calling thread: a key that identifies the stack, and values of local variables. Python
// itself would make an object of each frame, which costs more than all the rest of tracing a collective.
#pragma once

#include "frames.hpp"
#include "python.hpp"

#if defined(COMMLENS_FRAMES)
namespace commlens {

// The calling stack as bytes, valid as a key as long as the code objects live. With the GIL.
inline py::bytes stack_key() {
  thread_local Words key;
  key.clear();
  add_frames(PyThreadState_Get(), key);
  return {reinterpret_cast<const char*>(key.data()), key.size() * sizeof(uint64_t)};
}

// The object that a frame refers to. From Python 3.14 the lowest two bits of a reference tell who counts it; both are set where it is a
// number and no object.
#if PY_VERSION_HEX >= 0x030E0000
inline PyObject* object_of(_PyStackRef reference) {
  constexpr uintptr_t tag = 3;
  return (reference.bits & tag) == tag ? nullptr : reinterpret_cast<PyObject*>(reference.bits & ~tag);
}
#else
inline PyObject* object_of(PyObject* reference) { return reference; }
#endif

// The value of a local variable of a frame that runs `code`; None if it has none. A variable that an inner function uses is in a cell.
inline PyObject* local_value(const _PyInterpreterFrame* frame, PyCodeObject* code, PyObject* name) {
  PyObject* names = code->co_localsplusnames;
  const Py_ssize_t count = PyTuple_GET_SIZE(names);
  Py_ssize_t at = 0;
  while (at < count && PyTuple_GET_ITEM(names, at) != name) ++at;  // both are interned
  PyObject* value = at < count ? object_of(frame->localsplus[at]) : nullptr;
  if (value && PyCell_Check(value)) value = PyCell_GET(value);
  return Py_NewRef(value ? value : Py_None);
}

// The values of local variables in the innermost frame that runs `code`; None for missing ones. With the GIL.
inline PyObject* local_values(PyObject* code, PyObject* names) {
  PyThreadState* thread = PyThreadState_Get();
#if PY_VERSION_HEX >= 0x030D0000
  const _PyInterpreterFrame* frame = thread->current_frame;
  while (frame && object_of(frame->f_executable) != code) frame = frame->previous;
#else
  const _PyInterpreterFrame* frame = thread->cframe->current_frame;
  while (frame && reinterpret_cast<PyObject*>(frame->f_code) != code) frame = frame->previous;
#endif
  const Py_ssize_t count = PyTuple_GET_SIZE(names);
  PyObject* values = PyTuple_New(count);
  for (Py_ssize_t i = 0; values && i < count; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    PyTuple_SET_ITEM(values, i, frame ? local_value(frame, reinterpret_cast<PyCodeObject*>(code), name) : Py_NewRef(Py_None));
  }
  return values;
}

}  // namespace commlens
#endif
