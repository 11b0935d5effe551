// The other half of the recorder, which is in Python: commlens.capture.native_recorder.NativeRecorder. It is called where something
// is seen for the first time or has failed, never per collective.
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

  // The op of this record ended with this error. With the GIL.
  void mark_failed(uint64_t offset, uint64_t index, const pybind11::object& error, uint32_t thread, uint64_t how) const {
    call("mark_failed", offset, index, error, thread, how);
  }

  // An error of ours. Whoever cannot even say so lets the job go on.
  void failed(const char* what) const noexcept {
    try {
      if (!python_runs()) return;
      Gil gil;
      PyErrKeeper keep;
      call("report_native_error", what);
    } catch (const std::exception&) {
    }
  }

 private:
  PyObject* const recorder_;  // kept for ever
};

}  // namespace commlens
