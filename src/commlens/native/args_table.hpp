// The table of interned arguments, by key. Python describes new arguments once.
#pragma once

#include <mutex>

#include "interned_args.hpp"
#include "box.hpp"
#include "host.hpp"
#include "signature.hpp"

namespace commlens {

namespace py = pybind11;

// The C++ form of Python's InternedArgs. With the GIL.
inline ArgsPtr from_python(const py::object& described) {
  auto args = std::make_shared<InternedArgs>();
  args->python = PyRef::of(described.ptr());
  args->peer = described.attr("peer").cast<int32_t>();
  args->tag = described.attr("tag").cast<int64_t>();
  args->flags = described.attr("flags").cast<uint32_t>();
  args->meets = described.attr("meets").cast<bool>();
  args->synchronous = described.attr("synchronous").cast<bool>();
  args->wait_only = described.attr("wait_only").cast<bool>();
  const auto op = described.attr("op").cast<std::string>();
  args->point_to_point = op == "send" || op == "recv";
  return args;
}

class ArgsTable {
 public:
  ArgsTable(Box& box, const Host& host) : box_(box), host_(host) {}

  ArgsPtr find(const OpSpec& spec, Arguments arguments) {
    thread_local Words key;
    thread_local ThreadCache<std::weak_ptr<InternedArgs>> recent;
    key.clear();
    auto* process_group = boxed<c10d::ProcessGroup>(arguments[spec.process_group]);
    TORCH_CHECK(process_group, "an op without a process group");
    key.push_back(reinterpret_cast<uintptr_t>(process_group));
    key.push_back(spec.number);
    for (const int at : spec.words) add_value(arguments[at], key);
    for (const int at : spec.tensors) add_value(arguments[at], key);
    const uint64_t hash = hash_of(key), generation = generation_.load(std::memory_order_acquire);
    if (auto* found = recent.find(generation, key, hash))
      if (ArgsPtr args = found->lock()) return args;
    const Words saved_key = key;  // a call into Python may issue a collective, which overwrites `key`
    ArgsPtr args = shared(spec, arguments, process_group, saved_key);
    recent.put(generation, saved_key, hash, args);
    return args;
  }

  // Whether the side table still holds the descriptions that a record needs now.
  bool described(const InternedArgs& args) const {
    const uint64_t floor = box_.side_floor();
    return (args.blob.load(std::memory_order_relaxed) > floor || args.too_large.load(std::memory_order_relaxed)) &&
           args.channel->blob.load(std::memory_order_relaxed) > floor;
  }

  // Write both descriptions into the side table. With the GIL.
  void describe(InternedArgs& args) {
    if (args.blob.load(std::memory_order_relaxed) <= box_.side_floor() && !args.too_large.load(std::memory_order_relaxed)) {
      args.blob = host_.call("args_blob", py::handle(args.python.get())).cast<uint64_t>();
      args.too_large = args.blob == 0;
    }
    channel_blob(*args.channel);
  }

  uint64_t channel_blob(Channel& channel) {
    if (channel.blob.load(std::memory_order_relaxed) <= box_.side_floor())
      channel.blob = host_.call("channel_blob", py::handle(channel.python.get())).cast<uint64_t>();
    return channel.blob;
  }

  void forget_group(const void* process_group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(process_group);
    generation_ = next_generation();
  }

  void forget_groups() {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.clear();
    generation_ = next_generation();
  }

  void renamed(PyObject* channel) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = channels_.find(channel);
    if (found != channels_.end()) found->second->blob = 0;
  }

 private:
  static constexpr size_t LIMIT = 10000;

  ArgsPtr shared(const OpSpec& spec, Arguments arguments, c10d::ProcessGroup* process_group, Words key) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto group = groups_.find(process_group);
      if (group != groups_.end()) {
        key[0] = group->second;
        if (ArgsPtr* found = table_.find(key, hash_of(key))) return *found;
      }
    }
    return ask(spec, arguments, process_group, std::move(key));
  }

  // Let Python describe new arguments.
  ArgsPtr ask(const OpSpec& spec, Arguments arguments, c10d::ProcessGroup* process_group, Words key) {
    TORCH_CHECK(python_runs(), "Python is shutting down");
    Gil gil;
    PyErrKeeper keep;
    py::tuple values(spec.arguments);
    for (size_t i = 0; i < spec.arguments; ++i) values[i] = torch::jit::toPyObject(arguments[i]);
    py::object described = host_.call("describe_args", spec.name, values, reinterpret_cast<uintptr_t>(process_group));
    ArgsPtr args = from_python(described);
    const bool sends = described.attr("op").cast<std::string>() == "send";
    py::object channel = described.attr("channel");
    const bool runs_ahead = channel.attr("runs_ahead").cast<bool>(), matches_tags = channel.attr("matches_tags").cast<bool>();
    const bool tells_results = channel.attr("backend").attr("tells_results").cast<bool>();
    c10d::Backend* const backend = runs_ahead ? backend_of(*process_group, channel.attr("device").cast<std::string>()) : nullptr;
    CompletionHooks* const hooks = backend ? hooks_of(*backend, channel.ptr()) : nullptr;
    WordTable<ArgsPtr> old;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& ours = channels_[channel.ptr()];
    if (!ours) {
      ours = std::make_unique<Channel>();
      ours->python = PyRef::of(channel.ptr());
      ours->runs_ahead = runs_ahead;
      ours->tells_results = tells_results;
      ours->backend = backend;
      ours->hooks = hooks;
    }
    args->channel = ours.get();
    args->number = args->point_to_point ? &ours->pairs[{args->peer, sends, false, 0}] : &ours->numbers;
    if (args->point_to_point && matches_tags) args->tagged = &ours->pairs[{args->peer, sends, true, args->tag}];
    auto& group = groups_[process_group];
    if (!group) group = ++group_ids_;
    key[0] = group;
    const uint64_t hash = hash_of(key);
    if (ArgsPtr* found = table_.find(key, hash)) return *found;  // another thread was faster
    if (table_.size() >= LIMIT) table_.swap(old);
    table_.put(std::move(key), hash, args);
    return args;
  }

  // Of a channel's first op: attached before it is issued.
  CompletionHooks* hooks_of(c10d::Backend& backend, PyObject* channel) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (channels_.count(channel)) return nullptr;
    }
    NoGil no_gil;  // the backend's lock may be held by a thread that wants the GIL
    return CompletionHooks::attach(backend, box_);
  }

  static c10d::Backend* backend_of(c10d::ProcessGroup& process_group, const std::string& device) {
    try {
      return process_group.getBackend(c10::Device(device).type()).get();
    } catch (const std::exception&) {  // a process group written in Python has none
      return nullptr;
    }
  }

  Box& box_;
  const Host& host_;
  // A thread that holds it takes no GIL and drops no Python object.
  std::mutex mutex_;
  std::unordered_map<const void*, uint64_t> groups_;
  uint64_t group_ids_ = 0;
  std::atomic<uint64_t> generation_{next_generation()};  // changes as soon as an address may belong to another group
  WordTable<ArgsPtr> table_;
  std::unordered_map<PyObject*, std::unique_ptr<Channel>> channels_;  // kept forever: there are few
};

}  // namespace commlens
