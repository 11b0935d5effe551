// Tells a profiler plugin what NCCL 2.30 tells it, by interface 6: communicators, calls, launches, and the kernels on their channels. The
// structures are those of NCCL's interface, by their layout. Transfers are not told: all ranks are on one node.
#pragma once

#include <dlfcn.h>

#include <cstdlib>

#include "transport.hpp"

extern "C" __attribute__((visibility("default"))) inline int ncclGetVersion(int* version) {  // the plugin asks for it
  *version = 23007;
  return 0;
}

namespace nccl_like {

// A call of NCCL, as the plugin hears of it.
struct NcclCall {
  const char* func;
  size_t count;
  const char* datatype;
  int root = -1;
  int peer = -1;  // of a send or a receive
  void* api = nullptr;
};

class Profiler {
 public:
  enum { COLL = 2, P2P = 4, KERNEL_CH = 64, COLL_API = 512, P2P_API = 1024 };
  enum { CHANNELS = 2, KERNEL_CH_STOP = 22 };

  static Profiler& get() {
    static auto* profiler = new Profiler();
    return *profiler;
  }

  void* init(uint64_t hash, const std::string& name, int size, int rank) {
    void* context = nullptr;
    if (plugin_) plugin_->init(&context, hash, &mask_, name.empty() ? nullptr : name.c_str(), 1, size, rank, &log);
    return context;
  }
  void finalize(void* context) {
    if (plugin_ && context) plugin_->finalize(context);
  }

  // In the thread of the caller. Returns a handle, the parent of the launches.
  void* call(void* context, const NcclCall& of, bool captured) {
    Event event{};
    const bool is_message = of.peer >= 0;
    event.type = is_message ? P2P_API : COLL_API;
    if (!wants(event.type | (is_message ? P2P : COLL), context)) return nullptr;
    if (is_message) event.p2p_api = {of.func, of.count, of.datatype, nullptr, captured};
    else event.coll_api = {of.func, of.count, of.datatype, of.root, nullptr, captured};
    return stopped(start(context, event));
  }

  // What is captured is launched once for each replay, if the plugin wants kernels, else at its capture.
  bool launches_replays() const { return mask_ & KERNEL_CH; }

  void* launch(void* context, const NcclCall& of) {
    Event event{};
    const bool is_message = of.peer >= 0;
    event.type = is_message ? P2P : COLL;
    event.parent = of.api;
    if (!wants(event.type | KERNEL_CH, context)) return nullptr;
    if (is_message) event.p2p = {of.func, nullptr, of.datatype, of.count, of.peer, CHANNELS, nullptr};
    else event.coll = {0, of.func, nullptr, nullptr, of.count, of.root, of.datatype, CHANNELS, 16, "RING", "SIMPLE", nullptr};
    return stopped(start(context, event));
  }

  std::vector<void*> start_kernels(void* context, const std::vector<void*>& tasks) {
    std::vector<void*> running;
    for (int channel = 0; channel < CHANNELS; ++channel)
      for (void* task : tasks) {
        Event event{};
        event.type = KERNEL_CH;
        event.parent = task;
        event.kernel = {static_cast<uint8_t>(channel), now_ns()};
        if (task && wants(KERNEL_CH, context)) running.push_back(start(context, event));
      }
    return running;
  }

  void stop_kernels(const std::vector<void*>& running) {
    for (void* handle : running) {
      uint64_t timer = now_ns();
      if (!handle) continue;
      plugin_->record(handle, KERNEL_CH_STOP, &timer);
      plugin_->stop(handle);
    }
  }

 private:
  struct Event {
    uint64_t type;
    void* parent;
    int rank;
    union {
      struct { const char* func; size_t count; const char* datatype; int root; void* stream; bool captured; } coll_api;
      struct { const char* func; size_t count; const char* datatype; void* stream; bool captured; } p2p_api;
      struct { uint64_t number; const char* func; const void* sent; void* received; size_t count; int root; const char* datatype;
               uint8_t channels, warps; const char* algo; const char* proto; void* group; } coll;
      struct { const char* func; void* buffer; const char* datatype; size_t count; int peer; uint8_t channels; void* group; } p2p;
      struct { uint8_t channel; uint64_t timer; } kernel;
    };
  };
  using Logger = void (*)(int, unsigned long, const char*, int, const char*, ...);
  struct Plugin {
    const char* name;
    int (*init)(void**, uint64_t, int*, const char*, int, int, int, Logger);
    int (*start)(void*, void**, Event*);
    int (*stop)(void*);
    int (*record)(void*, int, void*);
    int (*finalize)(void*);
  };

  Profiler() {
    const char* path = std::getenv("NCCL_PROFILER_PLUGIN");
    void* library = path && *path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    plugin_ = library ? static_cast<Plugin*>(dlsym(library, "ncclProfiler_v6")) : nullptr;
  }

  static void log(int, unsigned long, const char*, int, const char*, ...) {}
  static uint64_t now_ns() { return static_cast<uint64_t>(Clock::now().time_since_epoch().count()); }
  bool wants(uint64_t events, void* context) const { return context && mask_ & static_cast<int>(events); }
  void* start(void* context, Event& event) {
    void* handle = nullptr;
    plugin_->start(context, &handle, &event);
    return handle;
  }
  void* stopped(void* handle) {
    if (handle) plugin_->stop(handle);
    return handle;
  }

  Plugin* plugin_ = nullptr;
  int mask_ = 0;
};

}  // namespace nccl_like
