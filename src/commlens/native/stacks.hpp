// Python stacks on the hot path: recognised by their code objects and instruction offsets. Lines are looked up by Python, once.
#pragma once

#include <vector>

#include "python.hpp"
#include "words.hpp"

namespace commlens {

// All of it with the GIL, which is its lock.
class Stacks {
 public:
  // The position of the calling thread's stack in the side table, without the `skip` innermost frames; `describe` puts a new one there.
  template <class Describe>
  uint64_t position(uint64_t floor, int skip, Describe describe) {
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    for (; frame && skip > 0; --skip) {
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    if (!frame) return 0;
    thread_local Words key;
    key.clear();
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      key.push_back(reinterpret_cast<uintptr_t>(code));
      Py_DECREF(code);  // its frame keeps it
#if PY_VERSION_HEX >= 0x030B0000
      key.push_back(static_cast<uint64_t>(PyFrame_GetLasti(frame)));
#else
      key.push_back(static_cast<uint64_t>(frame->f_lasti));
#endif
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    const uint64_t hash = hash_of(key);
    if (Known* known = known_.find(key, hash)) {
      if (known->position > floor) return known->position;
      const uint64_t position = describe();
      if ((known = known_.find(key, hash))) known->position = position;
      return position;
    }
    Words kept = key;  // describing runs Python code, which may come back here
    const uint64_t position = describe();
    WordTable<Known> old;
    if (known_.size() >= LIMIT) known_.swap(old);
    Known known{position, {}};
    for (size_t i = 0; i < kept.size(); i += 2) known.codes.push_back(PyRef::of(reinterpret_cast<PyObject*>(kept[i])));
    known_.put(std::move(kept), hash, std::move(known));
    return position;
  }

 private:
  static constexpr size_t LIMIT = 20000;
  struct Known {
    uint64_t position;
    std::vector<PyRef> codes;  // an address is only good as long as its object lives
  };
  WordTable<Known> known_;
};

}  // namespace commlens
