// Python stacks on the hot path, identified by their instructions. Python looks up the lines once.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "frames.hpp"
#include "python.hpp"
#include "words.hpp"

namespace commlens {

class Stacks {
 public:
  // The position of the calling thread's stack in the side table, without its `skip` innermost frames, joined with the stack that has the
  // number `caller` (0: with none); 0 if it has no frames, or if Python is shutting down. `thread` is null if Python does not know the
  // thread. `describe` adds a new stack, with the GIL.
  template <class Describe>
  uint64_t position(PyThreadState* thread, uint64_t caller, uint64_t floor, int skip, Describe describe) {
    thread_local Words key;
    thread_local ThreadCache<uint64_t> recent;
    if (!python_runs()) return 0;
    key.clear();
    key.push_back(static_cast<uint64_t>(skip));
    key.push_back(caller);
    if (!thread) {
      // no frames
    } else if (FRAMES_NEED_GIL) {
      Gil gil;
      add_frames(thread, key);
    } else {
      add_frames(thread, key);
    }
    if (key.size() == 2 && !caller) return 0;
    const uint64_t hash = hash_of(key), generation = generation_.load(std::memory_order_acquire);
    const uint64_t* found = recent.find(generation, key, hash);
    if (found && *found > floor) return *found;
    const Words kept = key;  // describe() runs Python code, which may come back here
    Gil gil;
    PyErrKeeper keep;
    const uint64_t position = shared(kept, hash, floor, describe);
    recent.put(generation, kept, hash, position);
    return position;
  }

 private:
  static constexpr size_t LIMIT = 20000;
  struct Known {
    uint64_t position;
    std::vector<PyRef> codes;  // an address is valid only while its object lives
  };

  // With the GIL, which locks the table.
  template <class Describe>
  uint64_t shared(const Words& key, uint64_t hash, uint64_t floor, Describe describe) {
    if (Known* known = known_.find(key, hash)) {
      if (known->position > floor) return known->position;
      const uint64_t position = describe();
      if ((known = known_.find(key, hash))) known->position = position;
      return position;
    }
    const uint64_t position = describe();
    WordTable<Known> old;
    if (known_.size() >= LIMIT) {
      generation_.store(next_generation(), std::memory_order_release);  // empties the threads' caches before the code objects may die
      known_.swap(old);
    }
    known_.put(key, hash, Known{position, codes()});
    return position;
  }

  static std::vector<PyRef> codes() {
    std::vector<PyRef> all;
    for (PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get()); frame;) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      all.push_back(PyRef::of(reinterpret_cast<PyObject*>(code)));
      Py_DECREF(code);
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    return all;
  }

  WordTable<Known> known_;
  std::atomic<uint64_t> generation_{next_generation()};
};

}  // namespace commlens
