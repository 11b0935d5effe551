// The Python frames of the calling thread, as words that identify the stack. This creates no objects and changes no reference counts,
// unlike Python's own functions, which make an object of each frame.
#pragma once

#include <Python.h>

#include "words.hpp"

#if PY_VERSION_HEX >= 0x030E0000
#define COMMLENS_FRAME_HEADER "internal/pycore_interpframe_structs.h"
#else
#define COMMLENS_FRAME_HEADER "internal/pycore_frame.h"
#endif
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030F0000 && __has_include(COMMLENS_FRAME_HEADER)
#define COMMLENS_FRAMES 1
#ifndef Py_BUILD_CORE
#define Py_BUILD_CORE
#include COMMLENS_FRAME_HEADER
#undef Py_BUILD_CORE
#else
#include COMMLENS_FRAME_HEADER
#endif
#elif PY_VERSION_HEX < 0x030B0000
#include <frameobject.h>
#endif

namespace commlens {

// Whether add_frames needs the GIL. Without it, add_frames reads only what its own thread changes, which does not change while the thread
// runs C++.
#if defined(COMMLENS_FRAMES) || PY_VERSION_HEX < 0x030B0000
constexpr bool FRAMES_NEED_GIL = false;
#else
constexpr bool FRAMES_NEED_GIL = true;
#endif

// Appends a word or two for each frame, innermost first. A word is the address of an instruction or of a code object, valid as long as
// the code objects live.
inline void add_frames(PyThreadState* thread, Words& into) {
  const auto address = [](const void* pointer) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer)); };
#if defined(COMMLENS_FRAMES)
#if PY_VERSION_HEX >= 0x030D0000
  for (const _PyInterpreterFrame* frame = thread->current_frame; frame; frame = frame->previous) into.push_back(address(frame->instr_ptr));
#else
  for (const _PyInterpreterFrame* frame = thread->cframe->current_frame; frame; frame = frame->previous)
    into.push_back(address(frame->prev_instr));
#endif
#elif PY_VERSION_HEX < 0x030B0000
  for (const PyFrameObject* frame = thread->frame; frame; frame = frame->f_back) {
    into.push_back(address(frame->f_code));
    into.push_back(static_cast<uint64_t>(frame->f_lasti));
  }
#else
  for (PyFrameObject* frame = PyThreadState_GetFrame(thread); frame;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    into.push_back(address(code));
    Py_DECREF(code);  // its frame keeps it alive
    into.push_back(static_cast<uint64_t>(PyFrame_GetLasti(frame)));
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
#endif
}

}  // namespace commlens
