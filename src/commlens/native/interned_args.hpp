// The interned arguments of collectives, and their channels. Python (commlens/tap/interned_args.py) describes each once, on first sight.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "completion_hooks.hpp"
#include "exchange.hpp"
#include "python.hpp"
#include "words.hpp"

namespace commlens {

using Counter = std::atomic<uint64_t>;

struct Channel {
  PyRef python;  // commlens.tap.groups.LiveChannel
  std::atomic<uint64_t> blob{0};
  std::atomic<uint32_t> busy{0};  // the thread that is issuing on it now
  Counter numbers{0};
  bool runs_ahead = false;  // a synchronous call returns before the op is done; no Work is kept or polled
  bool tells_results = false;  // torch's watchdog thread sets the results of its Works
  CompletionHooks* hooks = nullptr;  // of a channel that runs ahead, if its backend has completion hooks
  c10d::Backend* backend = nullptr;  // of a channel that runs ahead; the process group, which every call passes, keeps it alive
  std::map<std::tuple<int, bool, bool, int64_t>, Counter> pairs;  // by peer, send, tagged, tag; under the recorder's mutex
};

struct InternedArgs {
  PyRef python;  // commlens.tap.interned_args.InternedArgs
  Channel* channel = nullptr;
  Counter* number = nullptr;
  Counter* tagged = nullptr;  // the counter of messages with this tag, where messages meet by tag
  std::atomic<uint64_t> blob{0};
  std::atomic<bool> too_large{false};
  Plans plans;                          // how C++ verifies it
  std::atomic<bool> never_planned{false};  // only Python verifies it
  int32_t peer = -1;
  int64_t tag = 0;
  uint32_t flags = 0;
  bool meets = false, synchronous = false, wait_only = false, point_to_point = false;
};

using ArgsPtr = std::shared_ptr<InternedArgs>;

}  // namespace commlens
