// The Python half of the recorder: commlens.capture.native_recorder.NativeRecorder. C++ calls it when something is new or has failed, never
// for each collective.
#pragma once

#include "python.hpp"

namespace commlens {

class Host {
 public:
  explicit Host(pybind11::object recorder) : recorder_(recorder.release().ptr()) {}

  // With the GIL.
  template <class... Arguments>
  pybind11::object call(const char* method, Arguments&&... arguments) const {
    return pybind11::handle(recorder_).attr(method)(std::forward<Arguments>(arguments)...);
  }

  PyObject* get() const { return recorder_; }

  // Record that a collective ended with an error. With the GIL.
  void mark_failed(uint64_t offset, uint64_t index, const pybind11::object& error, uint32_t thread, uint64_t how) const {
    call("mark_failed", offset, index, error, thread, how);
  }

  // Count an error of the native engine. If even that fails, the job goes on.
  void failed(const char* text) const noexcept {
    try {
      if (!python_runs()) return;
      Gil gil;
      PyErrKeeper keep;
      call("report_native_error", text);
    } catch (const std::exception&) {
    }
  }

 private:
  PyObject* const recorder_;  // kept forever
};

}  // namespace commlens
