// What has been asked for before, recognised by what tells questions apart; what is new is described by Python, once.
#pragma once

#include <mutex>

#include "asked.hpp"
#include "box.hpp"
#include "host.hpp"
#include "signature.hpp"

namespace commlens {

namespace py = pybind11;

// An Asked of Python's, with the GIL.
inline AskedPtr understood(const py::object& described) {
  auto asked = std::make_shared<Asked>();
  asked->python = PyRef::of(described.ptr());
  asked->peer = described.attr("peer").cast<int32_t>();
  asked->tag = described.attr("tag").cast<int64_t>();
  asked->flags = described.attr("flags").cast<uint32_t>();
  asked->synchronous = described.attr("synchronous").cast<bool>();
  asked->wait_tells = described.attr("wait_tells").cast<bool>();
  const auto op = described.attr("op").cast<std::string>();
  asked->point_to_point = op == "send" || op == "recv";
  return asked;
}

class Questions {
 public:
  Questions(const Box& box, const Host& host) : box_(box), host_(host) {}

  AskedPtr find(const OpSpec& spec, Arguments arguments) {
    thread_local Words key;
    thread_local Recent<std::weak_ptr<Asked>> recent;
    key.clear();
    auto* process_group = boxed<c10d::ProcessGroup>(arguments[spec.process_group]);
    TORCH_CHECK(process_group, "an op without a process group");
    key.push_back(reinterpret_cast<uintptr_t>(process_group));
    key.push_back(spec.number);
    for (const int at : spec.words) add_value(arguments[at], key);
    for (const int at : spec.tensors) add_value(arguments[at], key);
    const uint64_t hash = hash_of(key), age = age_.load(std::memory_order_acquire);
    if (auto* found = recent.find(age, key, hash))
      if (AskedPtr asked = found->lock()) return asked;
    const Words kept = key;  // Python, where it is asked, may come back here
    AskedPtr asked = shared(spec, arguments, process_group, kept);
    recent.put(age, kept, hash, asked);
    return asked;
  }

  // Whether the side table has lost a description that is needed now.
  bool described(const Asked& asked) const {
    const uint64_t floor = box_.side_floor();
    return (asked.blob.load(std::memory_order_relaxed) > floor || asked.too_large.load(std::memory_order_relaxed)) &&
           asked.channel->blob.load(std::memory_order_relaxed) > floor;
  }

  // With the GIL: both descriptions are in the side table.
  void describe(Asked& asked) {
    if (asked.blob.load(std::memory_order_relaxed) <= box_.side_floor() && !asked.too_large.load(std::memory_order_relaxed)) {
      asked.blob = host_.call("asked_blob", py::handle(asked.python.get())).cast<uint64_t>();
      asked.too_large = asked.blob == 0;
    }
    channel_blob(*asked.channel);
  }

  uint64_t channel_blob(Channel& channel) {
    if (channel.blob.load(std::memory_order_relaxed) <= box_.side_floor())
      channel.blob = host_.call("channel_blob", py::handle(channel.python.get())).cast<uint64_t>();
    return channel.blob;
  }

  void forget_group(const void* process_group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.erase(process_group);
    age_ = next_age();
  }

  void forget_groups() {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.clear();
    age_ = next_age();
  }

  void renamed(PyObject* channel) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = channels_.find(channel);
    if (found != channels_.end()) found->second->blob = 0;
  }

 private:
  static constexpr size_t ASKED_LIMIT = 10000;

  AskedPtr shared(const OpSpec& spec, Arguments arguments, c10d::ProcessGroup* process_group, Words key) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto group = groups_.find(process_group);
      if (group != groups_.end()) {
        key[0] = group->second;
        if (AskedPtr* found = asked_.find(key, hash_of(key))) return *found;
      }
    }
    return ask(spec, arguments, process_group, std::move(key));
  }

  // Seen for the first time: Python describes it.
  AskedPtr ask(const OpSpec& spec, Arguments arguments, c10d::ProcessGroup* process_group, Words key) {
    TORCH_CHECK(python_runs(), "Python has ended");
    Gil gil;
    PyErrKeeper keep;
    py::tuple values(spec.arguments);
    for (size_t i = 0; i < spec.arguments; ++i) values[i] = torch::jit::toPyObject(arguments[i]);
    py::object described = host_.call("ask", spec.name, values, reinterpret_cast<uintptr_t>(process_group));
    AskedPtr asked = understood(described);
    const bool sends = described.attr("op").cast<std::string>() == "send";
    py::object channel = described.attr("channel");
    const bool polls = channel.attr("polls").cast<bool>();
    WordTable<AskedPtr> old;
    std::lock_guard<std::mutex> lock(mutex_);
    auto& ours = channels_[channel.ptr()];
    if (!ours) {
      ours = std::make_unique<Channel>();
      ours->python = PyRef::of(channel.ptr());
      ours->polls = polls;
    }
    asked->channel = ours.get();
    asked->number = asked->point_to_point ? &ours->pairs[{asked->peer, sends, false, 0}] : &ours->numbers;
    if (asked->point_to_point && polls) asked->tagged = &ours->pairs[{asked->peer, sends, true, asked->tag}];
    auto& group = groups_[process_group];
    if (!group) group = ++group_ids_;
    key[0] = group;
    const uint64_t hash = hash_of(key);
    if (AskedPtr* found = asked_.find(key, hash)) return *found;  // two threads met here
    if (asked_.size() >= ASKED_LIMIT) asked_.swap(old);
    asked_.put(std::move(key), hash, asked);
    return asked;
  }

  const Box& box_;
  const Host& host_;
  // While it is held, no GIL is taken, and no Python object dropped.
  std::mutex mutex_;
  std::unordered_map<const void*, uint64_t> groups_;
  uint64_t group_ids_ = 0;
  std::atomic<uint64_t> age_{next_age()};  // another as soon as an address may be another group's
  WordTable<AskedPtr> asked_;
  std::unordered_map<PyObject*, std::unique_ptr<Channel>> channels_;  // kept for ever: there are few
};

}  // namespace commlens
