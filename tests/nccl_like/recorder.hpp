// torch's own Flight Recorder code, filled as ProcessGroupNCCL fills it. torch before 2.7 does not ship it.
#pragma once

#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>

#include "device.hpp"

#if __has_include(<torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>)
#include <torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>
#define NCCL_LIKE_RECORDS 1

namespace c10d {
template <>
inline float getDurationFromEvent<nccl_like::Event>(nccl_like::Event& start, nccl_like::Event& end) {
  return std::chrono::duration<float, std::milli>(end.at() - start.at()).count();
}
}  // namespace c10d
#endif

#if !defined(NCCL_LIKE_RECORDS)
namespace c10d {
struct ProcessGroupStatus {
  int64_t lastEnqueuedSeq = -1, lastStartedSeq = -1, lastCompletedSeq = -1;
  std::string lastEnqueuedWorkName, lastStartedWorkName, lastCompletedWorkName;
  size_t lastEnqueuedNumelIn, lastEnqueuedNumelOut, lastCompletedNumelIn, lastCompletedNumelOut, lastStartedNumelIn, lastStartedNumelOut;
};
}  // namespace c10d
#endif

namespace nccl_like {

using Status = std::shared_ptr<c10d::ProcessGroupStatus>;

struct EntryId {
  std::optional<size_t> id, epoch;
};

struct Entry {
  size_t pg_id;
  std::tuple<std::string, std::string> pg_name;
  size_t collective, p2p, op;
  std::string title;
  std::vector<at::Tensor> inputs, outputs;
  Event *start, *end;
  Milliseconds timeout;
  Status status;
  bool is_p2p;
};

#ifdef NCCL_LIKE_RECORDS
using Recorder = c10d::FlightRecorder<Event>;

// From torch 2.10 an entry is known by its number and the number of the reset before it.
template <typename R>
auto record_in(R& recorder, const Entry& e, int) -> decltype(recorder.recordWithResetEnabled(
    e.pg_id, e.pg_name, e.collective, e.p2p, e.op, e.title, e.inputs, e.outputs, e.start, e.end, e.timeout, e.status, e.is_p2p), EntryId()) {
  const auto made = recorder.recordWithResetEnabled(
      e.pg_id, e.pg_name, e.collective, e.p2p, e.op, e.title, e.inputs, e.outputs, e.start, e.end, e.timeout, e.status, e.is_p2p);
  return {made.id, made.reset_epoch};
}
template <typename R>
EntryId record_in(R& recorder, const Entry& e, long) {
  return {
      recorder.record(
          e.pg_id, e.pg_name, e.collective, e.p2p, e.op, e.title, e.inputs, e.outputs, e.start, e.end, e.timeout, e.status, e.is_p2p),
      std::nullopt};
}
template <typename R>
auto retire_in(R& recorder, const EntryId& entry, int) -> decltype(recorder.retire_id(entry.id, entry.epoch, true)) {
  recorder.retire_id(entry.id, entry.epoch, true);
}
template <typename R>
void retire_in(R& recorder, const EntryId& entry, long) {
  recorder.retire_id(entry.id, true);
}
template <typename R>
auto traceback_in(R& recorder, const EntryId& entry, int) -> decltype(recorder.getEntry(entry.id, entry.epoch)) {
  return recorder.getEntry(entry.id, entry.epoch);
}
template <typename R>
auto traceback_in(R& recorder, const EntryId& entry, long) -> decltype(recorder.getEntry(entry.id)) {
  return recorder.getEntry(entry.id);
}
template <typename R>
auto name_library_in(R& recorder, int) -> decltype(recorder.record_accelerator_version("")) {
  recorder.record_accelerator_version("2.28.9");
}
template <typename R>
void name_library_in(R&, long) {}

inline EntryId record(const Entry& entry) { return record_in(*Recorder::get(), entry, 0); }
inline void retire(const EntryId& entry) { retire_in(*Recorder::get(), entry, 0); }
inline void record_ranks(const std::tuple<std::string, std::string>& name, const std::vector<uint64_t>& ranks) {
  Recorder::get()->record_pg_ranks(name, ranks);
  name_library_in(*Recorder::get(), 0);
}
inline std::string traceback(const EntryId& entry) {
  auto found = traceback_in(*Recorder::get(), entry, 0);
  return found ? found->getTraceback() : "";
}
inline bool recorder_is_on() { return Recorder::get()->enabled_; }
inline std::string dump(bool collectives, bool stacks, bool only_active) {
  return Recorder::get()->dump(std::nullopt, collectives, stacks, only_active);
}
inline std::string dump_json(bool collectives, bool only_active) { return Recorder::get()->dump_json(std::nullopt, collectives, only_active); }
inline void write_dump(int rank, const std::string& text) { c10d::DebugInfoWriter::getWriter(rank).write(text); }
#else
inline EntryId record(const Entry&) { return {}; }
inline void retire(const EntryId&) {}
inline void record_ranks(const std::tuple<std::string, std::string>&, const std::vector<uint64_t>&) {}
inline std::string traceback(const EntryId&) { return ""; }
inline bool recorder_is_on() { return false; }
#endif

}  // namespace nccl_like
