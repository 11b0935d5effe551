// The backend: counters, communicators and records as ProcessGroupNCCL keeps them, on tensors of the CPU.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <map>
#include <random>

#include "interception.hpp"
#include "watchdog2.hpp"

namespace nccl_like {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

inline std::atomic<bool> sync_returns_work{false};  // as NCCL before torch 2.8
inline std::atomic<bool> connects_eagerly{false};

// Whether the caller asked for a Work. Options of torch before 2.8 do not say.
template <typename Options>
auto is_async(const Options& options, int) -> decltype(options.asyncOp) {
  return options.asyncOp;
}
template <typename Options>
bool is_async(const Options&, long) {
  return true;
}

// The same memory without its history: what a kernel holds.
inline at::Tensor alias_of(const at::Tensor& tensor) { return tensor.variable_data(); }

class Backend : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds timeout) : c10d::Backend::Options("nccl", timeout) {}
  };

  Backend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Milliseconds timeout, const std::string& name, std::vector<uint64_t> ranks)
      : c10d::Backend(rank, size), store_(std::move(store)), options_(c10::make_intrusive<Options>(timeout)), ranks_(std::move(ranks)) {
    static std::atomic<size_t> backends{0};
    group_->local_id = backends.fetch_add(1);
    group_->rank = rank;
    group_->size = size;
    group_->global_rank = Watchdog::first_global_rank(rank);
    group_->uid = name;
    auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store_.get());
    group_->global_store = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store_;
    setGroupUid(name);
    if (ranks_.empty())
      for (int i = 0; i < size; ++i) ranks_.push_back(static_cast<uint64_t>(i));
    timing_ = c10d::getCvarBool({"TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"}, false) || dist_debug_level_ >= c10d::DebugLevel::Detail ||
        c10d::getCvarBool({"TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"}, false);
    blocking_wait_ = c10d::getCvarBool({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, false);
    if (is_nccl2.load()) {
      eager_ = true;
      watchdog_ = std::make_unique<Watchdog2>(group_, blocking_wait_, [this] { abort_communicators(); });
    } else if (!blocking_wait_) {
      watchdog_ = std::make_unique<Watchdog>(group_);
    }
    init();
    std::lock_guard<std::mutex> lock(all_mutex());
    all().insert(this);
    if (connects_eagerly.load()) eager_ = true;
  }

  // Without torch: no watchdog, no records, a communicator of the program's own, as ncclCommInitRank makes one.
  void leave_torch() {
    is_raw_ = eager_ = true;
    if (watchdog_) watchdog_->stop();
    watchdog_.reset();
    communicator("0", rank_, size_);
  }

  ~Backend() override {
    {
      std::lock_guard<std::mutex> lock(all_mutex());
      all().erase(this);
    }
    NoGil no_gil;
    abort();
    watchdog_.reset();
  }

  // Every backend of the process that is alive.
  static std::set<Backend*>& all() {
    static auto* backends = new std::set<Backend*>();
    return *backends;
  }
  static std::mutex& all_mutex() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }

  void connect_if_eager() {
    if (eager_) communicator("0", rank_, size_);
  }

  // --- what Backend offers

  uint64_t uid() const { return group_->local_id; }
  // Not all marked as overrides: torch before 2.8 does not have them.
  const std::string getBackendName() const override { return is_nccl2.load() ? "nccl2" : "nccl"; }
#ifdef NCCL_LIKE_HOOKS
  bool supportsCompletionHooks() const override { return is_nccl2.load(); }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    std::lock_guard<std::mutex> lock(group_->hooks_mutex);
    group_->hooks[id] = std::move(hook);
  }
  void unregisterCompletionHook(int64_t id) override {
    std::lock_guard<std::mutex> lock(group_->hooks_mutex);
    group_->hooks.erase(id);
  }
  bool supportsAbortHooks() const override { return is_nccl2.load(); }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    std::lock_guard<std::mutex> lock(group_->hooks_mutex);
    group_->abort_hooks[id] = std::move(hook);
  }
  void unregisterAbortHook(int64_t id) override {
    std::lock_guard<std::mutex> lock(group_->hooks_mutex);
    group_->abort_hooks.erase(id);
  }
#endif
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() { return options_; }
  void setTimeout(Milliseconds timeout) { options_->timeout = timeout; }
  bool supportsCoalescing() const { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return seq_collective_; }

  // Wait for the kernels of this group, then end its threads: the normal end. Gives up at the group's timeout.
  void shutdown() {
    const auto end = Clock::now() + options_->timeout;
    while (last_kernel_ > Device::get().done() && Clock::now() < end && !Device::get().is_stopping()) std::this_thread::sleep_for(Milliseconds(1));
    abort();
    if (watchdog_) watchdog_->stop();
  }

  // End the kernels of this group, and wait a moment for them.
  void abort() {
    if (watchdog_) watchdog_->terminate();
    abort_communicators();
    for (int i = 0; i < 100 && last_kernel_ > Device::get().done() && !Device::get().is_stopping(); ++i) std::this_thread::sleep_for(Milliseconds(2));
  }

  void abort_communicators() {
    std::lock_guard<std::mutex> lock(communicators_mutex_);
    for (auto& named : communicators_) {
      named.second->aborted.store(true);
      Profiler::get().finalize(std::exchange(named.second->profiled, nullptr));
    }
    if (connecting_) connecting_->aborted.store(true);
  }

  void stop_threads() {
    if (watchdog_) watchdog_->stop();
  }

  // --- groups of operations

  void startCoalescing() override {
    coalesced_ = {};
    coalescing_ |= ACTIVE;
    ++open_groups();
  }

  WorkPtr endCoalescing() override { return endCoalescing(OpType::COALESCED); }

  WorkPtr endCoalescing(OpType type) {
    --open_groups();
    if (!coalesced_.communicator) {
      coalescing_ = 0;
      return is_nccl2.load() ? WorkPtr(c10::make_intrusive<CompletedWork>()) : nullptr;
    }
    const std::string title = type == OpType::COALESCED ? "nccl:coalesced" : "nccl:" + c10d::opTypeToString(type) + "_coalesced";
    const bool is_p2p = coalescing_ & P2P, is_async = coalesced_.is_async;
    auto kernel = kernel_of(coalesced_.communicator, std::move(coalesced_.program), std::move(coalesced_.memory));
    const bool captured = Device::get().is_capturing();
    // The closing entry is not marked as P2P, and carries both numbers.
    auto work = init_work(type, is_p2p, title.c_str(), {}, {}, kernel, !captured);
    Device::get().launch(kernel, !is_async);
    finish(work, {}, captured);
    coalescing_ = 0;
    coalesced_ = {};
    return is_async || sync_returns_work.load() ? work : nullptr;
  }

  // --- collectives

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto tensor = real(one(tensors), &options.reduceOp);
    check(tensor);
    return allreduce_of(tensor, options, "nccl:all_reduce");
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Collective> all;
    for (const auto& tensor : tensors) all.push_back(make_allreduce(tensor, options.reduceOp));
    return collective_coalesced(tensors, tensors, std::move(all), is_async(options, 0), "nccl:allreduce_coalesced");
  }

  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override {
    C10_THROW_ERROR(Error, "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead.");
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto tensor = real(one(tensors));
    check(tensor);
    return collective(
        {tensor}, {tensor}, {tensor}, make_broadcast(tensor, tensor, root_of(options)), OpType::BROADCAST, is_async(options, 0), "nccl:broadcast");
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto tensor = real(one(tensors), &options.reduceOp);
    check(tensor);
    return collective(
        {tensor}, {tensor}, {tensor}, make_reduce(tensor, tensor, root_of(options), options.reduceOp), OpType::REDUCE, is_async(options, 0),
        "nccl:reduce");
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto input = one(inputs);
    check(input);
    auto& parts = outputs.back();
    if (same_size(parts)) {
      return collective({input}, {flat_like(parts)}, join({input}, parts), make_allgather(input, parts, OpType::ALLGATHER), OpType::ALLGATHER,
                        is_async(options, 0), "nccl:all_gather");
    }
    startCoalescing();
    for (int i = 0; i < size_; ++i) {
      const auto& source = i == rank_ ? input : parts[i];
      collective({source}, {parts[i]}, {source, parts[i]}, make_broadcast(source, parts[i], i), OpType::BROADCAST, is_async(options, 0),
                 "nccl:_broadcast_oop");
    }
    return endCoalescing(OpType::ALLGATHER);
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override {
    C10_THROW_ERROR(NotImplementedError, "ProcessGroupNCCL does not support allgather_coalesced");
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    check(input);
    check(output);
    if (input.dtype() != output.dtype()) C10_THROW_ERROR(TypeError, "output tensor must have the same type as input tensor");
    if (input.numel() * size_ != output.numel())
      C10_THROW_ERROR(ValueError, "output tensor size must be equal to world_size times input tensor size");
    return collective({input}, {output}, {input, output}, make_allgather(input, chunks(output), OpType::_ALLGATHER_BASE),
                      OpType::_ALLGATHER_BASE, is_async(options, 0), "nccl:_all_gather_base");
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Collective> all;
    for (size_t i = 0; i < inputs.size(); ++i) all.push_back(make_allgather(inputs[i], chunks(outputs[i]), OpType::_ALLGATHER_BASE));
    return collective_coalesced(inputs, outputs, std::move(all), is_async(options, 0), "nccl:all_gather_into_tensor_coalesced");
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto output = one(outputs);
    check(output);
    auto& parts = inputs.back();
    if (same_size(parts)) {
      return collective({flat_like(parts)}, {output}, join({output}, parts),
                        make_reduce_scatter(parts, output, options.reduceOp, OpType::REDUCE_SCATTER), OpType::REDUCE_SCATTER,
                        is_async(options, 0), "nccl:reduce_scatter");
    }
    startCoalescing();
    for (int i = 0; i < size_; ++i) {
      const auto& target = i == rank_ ? output : parts[i];
      collective({parts[i]}, {target}, {parts[i], target}, make_reduce(parts[i], target, i, options.reduceOp), OpType::REDUCE,
                 is_async(options, 0), "nccl:_reduce_oop");
    }
    return endCoalescing(OpType::REDUCE_SCATTER);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (input.dtype() != output.dtype()) C10_THROW_ERROR(TypeError, "input tensor must be the same type as the output tensor.");
    if (input.numel() != output.numel() * size_)
      C10_THROW_ERROR(ValueError, "input tensor must be the same size as output size times world size");
    return collective({input}, {output}, {input, output},
                      make_reduce_scatter(chunks(input), output, options.reduceOp, OpType::_REDUCE_SCATTER_BASE),
                      OpType::_REDUCE_SCATTER_BASE, is_async(options, 0), "nccl:_reduce_scatter_base");
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Collective> all;
    for (size_t i = 0; i < inputs.size(); ++i)
      all.push_back(make_reduce_scatter(chunks(inputs[i]), outputs[i], options.reduceOp, OpType::_REDUCE_SCATTER_BASE));
    return collective_coalesced(inputs, outputs, std::move(all), is_async(options, 0), "nccl:reduce_scatter_tensor_coalesced");
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    check(input);
    check(output);
    return collective({input}, {output}, {input, output}, make_alltoall(split(input, input_splits), split(output, output_splits)),
                      OpType::ALLTOALL_BASE, is_async(options, 0), "nccl:all_to_all");
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    for (const auto& tensor : join(inputs, outputs)) check(tensor);
    return collective(inputs, outputs, join(inputs, outputs), make_alltoall(inputs, outputs), OpType::ALLTOALL, is_async(options, 0),
                      "nccl:all_to_all");
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto input = one(inputs);
    check(input);
    const bool is_root = rank_ == options.rootRank;
    const Tensors parts = is_root ? outputs.at(0) : Tensors{};
    TORCH_CHECK_WITH(ValueError, is_root || outputs.empty(), "ProcessGroupNCCL::gather: requires empty output on non-root");
    TORCH_CHECK_WITH(ValueError, !is_root || parts.size() == static_cast<size_t>(size_), "ProcessGroupNCCL::gather: Incorrect output list size ",
                     parts.size());
    Collective made = plain(OpType::GATHER, input, options.rootRank);
    made.to[options.rootRank] = static_cast<int64_t>(bytes_of(input));
    if (is_root) std::fill(made.from.begin(), made.from.end(), static_cast<int64_t>(bytes_of(input)));
    made.pack = [input = alias_of(input), root = options.rootRank, size = size_] {
      Blobs blobs(size);
      blobs[root] = packed(input);
      return blobs;
    };
    made.unpack = [parts = aliases(parts)](Blobs& blobs) { unpack_each(parts, blobs); };
    return collective({input}, is_root ? parts : Tensors{at::Tensor()}, join({input}, parts), std::move(made), OpType::GATHER, is_async(options, 0),
                      "nccl:gather");
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto output = one(outputs);
    check(output);
    const bool is_root = rank_ == options.rootRank;
    const Tensors parts = is_root ? inputs.at(0) : Tensors{};
    TORCH_CHECK_WITH(ValueError, is_root || inputs.empty(), "ProcessGroupNCCL::scatter: requires empty input on non-root");
    TORCH_CHECK_WITH(ValueError, !is_root || parts.size() == static_cast<size_t>(size_), "ProcessGroupNCCL::scatter: Incorrect input list size ",
                     parts.size());
    Collective made = plain(OpType::SCATTER, output, options.rootRank);
    made.from[options.rootRank] = static_cast<int64_t>(bytes_of(output));
    if (is_root) std::fill(made.to.begin(), made.to.end(), static_cast<int64_t>(bytes_of(output)));
    made.pack = [parts = aliases(parts), size = size_] {
      Blobs blobs(size);
      for (size_t i = 0; i < parts.size(); ++i) blobs[i] = packed(parts[i].contiguous());
      return blobs;
    };
    made.unpack = [output = alias_of(output), root = options.rootRank](Blobs& blobs) { unpack_into(output, blobs[root]); };
    // NCCL records a scatter's output as its input, and the reverse.
    return collective({output}, is_root ? parts : Tensors{at::Tensor()}, join({output}, parts), std::move(made), OpType::SCATTER,
                      is_async(options, 0), "nccl:scatter");
  }

  // An all_reduce of one element. The thread of the caller waits for it, unless it asked for a Work: then wait() does.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    at::Tensor token = at::zeros({1}, at::kFloat);
    c10d::AllreduceOptions reduce;
    const bool async = is_async(options, 0);
    set_async(reduce, async, 0);
    auto work = allreduce_of(token, reduce, "nccl:all_reduce_barrier");
    if (work) {
      // nccl2's wait() blocks the caller after a synchronous barrier only
      static_cast<WorkNCCL*>(work.get())->operation()->is_barrier = !is_nccl2.load() || !async;
      return work;
    }
    synchronize();
    return nullptr;
  }

  // --- messages

  WorkPtr send(Tensors& tensors, int peer, int) override {
    auto tensor = one(tensors);
    check(tensor, true);
    return point_to_point(tensor, peer, OpType::SEND, c10::str("nccl:send ", rank_, "->", peer));
  }

  WorkPtr recv(Tensors& tensors, int peer, int) override {
    auto tensor = one(tensors);
    check(tensor, true);
    return point_to_point(tensor, peer, OpType::RECV, c10::str("nccl:recv ", rank_, "<-", peer));
  }

  WorkPtr recvAnysource(Tensors&, int) override { C10_THROW_ERROR(NotImplementedError, "ProcessGroupNCCL does not support recvAnysource"); }

 private:
  enum { ACTIVE = 1, COLLECTIVE = 2, P2P = 4 };

  struct Coalesced {
    std::shared_ptr<Communicator> communicator;
    Program program;
    Tensors memory;
    bool is_async = false;
  };

  static int& open_groups() {  // of all backends, as NCCL's group calls
    static thread_local int open = 0;
    return open;
  }

  // --- the common path

  WorkPtr collective(const Tensors& inputs, const Tensors& outputs, const Tensors& memory, Collective made, OpType type, bool async,
                     const char* title) {
    if (watchdog_ && !coalescing_) watchdog_->before_a_collective();
    if (!coalescing_) ++seq_collective_;
    ++op_id_;
    auto comm = communicator("0", rank_, size_);
    if (coalescing_ & ACTIVE) {
      if (!(coalescing_ & COLLECTIVE)) ++seq_collective_;
      coalescing_ |= COLLECTIVE;
      coalesced_.is_async = async;
      call(*comm, nccl_calls(made), coalesced_.program);
      coalesced_.program.collectives.push_back(std::move(made));
      add(memory, comm);
      note(entry(title, inputs, outputs, nullptr, nullptr, false));
      return async || sync_returns_work.load() ? idle_work(type, outputs) : nullptr;
    }
    Program program;
    call(*comm, nccl_calls(made), program);
    program.collectives.push_back(std::move(made));
    auto kernel = kernel_of(comm, std::move(program), memory);
    const bool captured = Device::get().is_capturing();
    auto work = init_work(type, false, title, inputs, outputs, kernel, !captured);
    work->operation()->numel_in = numel_of(inputs);
    work->operation()->numel_out = numel_of(outputs);
    Device::get().launch(kernel, !async);
    finish(work, outputs, captured);
    return async || sync_returns_work.load() ? work : nullptr;
  }

  // The calls that take several tensors at once: one number, one entry, one kernel.
  WorkPtr collective_coalesced(const Tensors& inputs, const Tensors& outputs, std::vector<Collective> made, bool async, const char* title) {
    if (watchdog_) watchdog_->before_a_collective();
    ++seq_collective_;
    ++op_id_;
    auto comm = communicator("0", rank_, size_);
    const bool captured = Device::get().is_capturing();
    Program program;
    for (const auto& each : made) call(*comm, nccl_calls(each), program);
    program.collectives = std::move(made);
    auto kernel = kernel_of(comm, std::move(program), join(inputs, outputs));
    auto work = init_work(OpType::COALESCED, false, title, inputs, outputs, kernel, true);
    work->operation()->numel_in = static_cast<size_t>(inputs[0].numel());
    work->operation()->numel_out = static_cast<size_t>(outputs[0].numel());
    if (coalescing_ & ACTIVE) {
      coalescing_ |= COLLECTIVE;
      coalesced_.is_async = async;
      coalesced_.communicator = comm;  // its closing entry belongs to a kernel without content
    }
    Device::get().launch(kernel, !async);
    finish(work, outputs, captured);
    return async || sync_returns_work.load() ? work : nullptr;
  }

  WorkPtr point_to_point(const at::Tensor& tensor, int peer, OpType type, const std::string& title) {
    const bool in_batch = open_groups() > 0, whole_group = eager_ || in_batch, to_self = peer == rank_;
    if (watchdog_ && !in_batch) watchdog_->before_a_collective();
    if (!in_batch && !coalescing_) ++seq_p2p_;
    ++op_id_;
    std::shared_ptr<Communicator> comm;
    PointToPoint message{type == OpType::SEND, peer, alias_of(tensor)};
    if (whole_group) {
      comm = communicator("0", rank_, size_);
    } else {
      const int low = std::min(rank_, peer), high = std::max(rank_, peer);
      comm = communicator(c10::str(low, ":", high), to_self ? 0 : rank_ != low, to_self ? 1 : 2);
      message.peer = to_self ? 0 : peer != low;
    }
    const NcclCall told{message.is_send ? "Send" : "Recv", static_cast<size_t>(tensor.numel()), nccl_type(tensor.scalar_type()), -1, message.peer};
    if (coalescing_ & ACTIVE) {
      if (!(coalescing_ & P2P)) ++seq_p2p_;
      coalescing_ |= P2P;
      coalesced_.is_async = true;  // P2P is always on a stream of its own
      call(*comm, {told}, coalesced_.program);
      coalesced_.program.messages.push_back(std::move(message));
      add({tensor}, comm);
      note(entry(title, {tensor}, {tensor}, nullptr, nullptr, true));
      return is_nccl2.load() ? WorkPtr(c10::make_intrusive<CompletedWork>(Tensors{tensor})) : nullptr;
    }
    Program program;
    call(*comm, {told}, program);
    program.messages.push_back(std::move(message));
    auto kernel = kernel_of(comm, std::move(program), {tensor});
    const bool captured = Device::get().is_capturing();
    auto work = init_work(type, true, title.c_str(), {tensor}, {}, kernel, false);
    record_into(*work->operation(), entry(title, {tensor}, {tensor}, timing_ ? kernel->start.get() : nullptr, kernel->end.get(), true));
    work->operation()->numel_in = work->operation()->numel_out = static_cast<size_t>(tensor.numel());
    Device::get().launch(kernel, false);
    finish(work, {tensor}, captured);
    return work;
  }

  c10::intrusive_ptr<WorkNCCL> init_work(OpType type, bool is_p2p, const char* title, const Tensors& inputs, const Tensors& outputs,
                                         const KernelPtr& kernel, bool records) {
    auto operation = std::make_shared<Operation>();
    operation->rank = rank_;
    operation->type = type;
    operation->seq = is_p2p ? seq_p2p_ : seq_collective_;
    operation->is_p2p = is_p2p;
    operation->timeout = options_->timeout;
    operation->blocking_wait = blocking_wait_;
    operation->group_name = getGroupUid();
    operation->timing = timing_;
    operation->kernel = kernel;
    operation->start = kernel->start;
    operation->end = kernel->end;
    Tensors defined;
    for (const auto& input : inputs)
      if (input.defined()) defined.push_back(input);
    auto work = c10::make_intrusive<WorkNCCL>(rank_, type, title, defined, operation);
    if (records)
      record_into(*operation, entry(title, inputs, outputs, timing_ ? kernel->start.get() : nullptr, kernel->end.get(), c10d::isP2POp(type)));
    return work;
  }

  // A member of a group has a Work without a kernel: the group's counts.
  WorkPtr idle_work(OpType type, const Tensors& outputs) {
    auto kernel = std::make_shared<Kernel>();
    kernel->communicator = coalesced_.communicator;
    auto work = init_work(type, false, nullptr, {}, {}, kernel, false);
    work->issued(outputs);
    return work;
  }

  void finish(const c10::intrusive_ptr<WorkNCCL>& work, const Tensors& outputs, bool captured) {
    const auto& operation = work->operation();
    last_kernel_ = std::max(last_kernel_, operation->kernel->number);
    Tensors defined;
    for (const auto& output : outputs)
      if (output.defined()) defined.push_back(output);
    work->issued(defined);
    if (!captured && watchdog_) watchdog_->enqueue(operation);
  }

  KernelPtr kernel_of(const std::shared_ptr<Communicator>& comm, Program program, const Tensors& memory) {
    auto kernel = std::make_shared<Kernel>();
    kernel->communicator = comm;
    kernel->calls = std::move(program.calls);
    kernel->tensors = aliases(memory);
    kernel->run = [program = std::make_shared<Program>(std::move(program))](const Kernel& self) {
      if (!self.communicator->aborted.load()) Run(*self.communicator)(*program);
    };
    return kernel;
  }

  // NCCL is called: a plugin hears of it in this thread.
  static void call(const Communicator& comm, std::vector<NcclCall> calls, Program& program) {
    for (auto& each : calls) {
      each.api = Profiler::get().call(comm.profiled, each, Device::get().is_capturing());
      program.calls.push_back(each);
    }
  }

  void add(const Tensors& memory, const std::shared_ptr<Communicator>& comm) {
    TORCH_CHECK(!coalesced_.communicator || coalesced_.communicator == comm, "Expecting one tensor only but got multiple.");
    coalesced_.communicator = comm;
    for (const auto& tensor : memory)
      if (tensor.defined()) coalesced_.memory.push_back(tensor);
  }

  // --- communicators

  // Made at the first call: blocks until the other ranks come, at most for the group's timeout.
  std::shared_ptr<Communicator> communicator(const std::string& key, int rank, int size) {
    {
      std::lock_guard<std::mutex> lock(communicators_mutex_);
      const auto found = communicators_.find(key);
      if (found != communicators_.end()) return found->second;
    }
    group_->description = getGroupDesc();
    group_->uid = getGroupUid();
    auto made = std::make_shared<Communicator>();
    {
      std::lock_guard<std::mutex> lock(communicators_mutex_);
      connecting_ = made;
    }
    NoGil no_gil;
    made->mesh = std::make_unique<Mesh>(*store_, "nccl_like/" + key, rank, size, options_->timeout, made->aborted);
    if (size > 1) {
      const auto name = is_nccl2.load() && !is_raw_ ? getGroupUid() : std::string();
      made->profiled = Profiler::get().init(shared_hash(key, rank), name, size, rank);
    }
    if (!is_nccl2.load() && !is_raw_) record_ranks(names(), ranks_);
    std::lock_guard<std::mutex> lock(communicators_mutex_);
    connecting_ = nullptr;
    return communicators_[key] = made;
  }

  // The same on all ranks: it is that of the unique id, which the first rank draws.
  uint64_t shared_hash(const std::string& key, int rank) {
    const auto at = "nccl_like/" + key + "/hash";
    if (rank == 0) store_->set(at, std::to_string(std::random_device{}() | 1ull << 32));
    store_->wait({at}, options_->timeout);
    const auto value = store_->get(at);
    return std::stoull(std::string(value.begin(), value.end()));
  }

  // --- the Flight Recorder

  std::tuple<std::string, std::string> names() const { return {getGroupUid(), getGroupDesc()}; }

  Entry entry(const std::string& title, const Tensors& inputs, const Tensors& outputs, Event* start, Event* end, bool is_p2p) const {
    return {group_->local_id, names(), seq_collective_, seq_p2p_, op_id_, title, inputs, outputs, start, end, options_->timeout, group_->status, is_p2p};
  }

  // torch's hooks fill the recorder of nccl2.
  void note(const Entry& entry) const {
    if (!is_nccl2.load() && !is_raw_) record(entry);
  }

  void record_into(Operation& operation, const Entry& entry) {
    if (is_nccl2.load() || is_raw_) return;
    operation.entry = record(entry);
    if (!watchdog_ || Device::get().is_capturing()) {  // never retired: the recorder keeps pointers to the events
      static auto* kept = new std::vector<std::shared_ptr<Event>>();
      static std::mutex mutex;
      std::lock_guard<std::mutex> lock(mutex);
      kept->push_back(operation.start);
      kept->push_back(operation.end);
    }
  }

  // --- what each collective exchanges

  Collective plain(OpType type, const at::Tensor& tensor, int64_t root = -1) const {
    Collective made;
    made.header.kind = static_cast<int64_t>(type);
    made.header.root = root;
    made.header.count = tensor.numel();
    made.type = tensor.scalar_type();
    made.to.assign(size_, 0);
    made.from.assign(size_, 0);
    return made;
  }

  WorkPtr allreduce_of(const at::Tensor& tensor, const c10d::AllreduceOptions& options, const char* title) {
    return collective({tensor}, {tensor}, {tensor}, make_allreduce(tensor, options.reduceOp), OpType::ALLREDUCE, is_async(options, 0), title);
  }

  Collective make_allreduce(const at::Tensor& tensor, const c10d::ReduceOp& how) const {
    check_reduction(tensor, how);
    Collective made = plain(OpType::ALLREDUCE, tensor);
    const auto bytes = static_cast<int64_t>(bytes_of(tensor));
    made.to.assign(size_, bytes);
    made.from.assign(size_, bytes);
    made.pack = [tensor = alias_of(tensor), size = size_] { return Blobs(size, packed(tensor)); };
    made.unpack = [tensor = alias_of(tensor), how](Blobs& blobs) { write(tensor, reduced(blobs, tensor.scalar_type(), how)); };
    return made;
  }

  Collective make_broadcast(const at::Tensor& input, const at::Tensor& output, int64_t root) const {
    Collective made = plain(OpType::BROADCAST, output, root);
    const auto bytes = static_cast<int64_t>(bytes_of(output));
    if (rank_ == root) made.to.assign(size_, bytes);
    made.from[root] = bytes;
    made.pack = [input = alias_of(input), is_root = rank_ == root, size = size_] { return is_root ? Blobs(size, packed(input)) : Blobs(size); };
    made.unpack = [output = alias_of(output), root](Blobs& blobs) { unpack_into(output, blobs[root]); };
    return made;
  }

  Collective make_reduce(const at::Tensor& input, const at::Tensor& output, int64_t root, const c10d::ReduceOp& how) const {
    check_reduction(input, how);
    Collective made = plain(OpType::REDUCE, input, root);
    const auto bytes = static_cast<int64_t>(bytes_of(input));
    made.to[root] = bytes;
    if (rank_ == root) made.from.assign(size_, bytes);
    made.pack = [input = alias_of(input), root, size = size_] {
      Blobs blobs(size);
      blobs[root] = packed(input);
      return blobs;
    };
    made.unpack = [output = alias_of(output), is_root = rank_ == root, how](Blobs& blobs) {
      if (is_root) write(output, reduced(blobs, output.scalar_type(), how));
    };
    return made;
  }

  Collective make_allgather(const at::Tensor& input, const Tensors& outputs, OpType type) const {
    TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "all_gather needs an output for each rank");
    Collective made = plain(type, input);
    const auto bytes = static_cast<int64_t>(bytes_of(input));
    made.to.assign(size_, bytes);
    made.from.assign(size_, bytes);
    made.pack = [input = alias_of(input), size = size_] { return Blobs(size, packed(input)); };
    made.unpack = [outputs = aliases(outputs)](Blobs& blobs) { unpack_each(outputs, blobs); };
    return made;
  }

  Collective make_reduce_scatter(const Tensors& inputs, const at::Tensor& output, const c10d::ReduceOp& how, OpType type) const {
    TORCH_CHECK(inputs.size() == static_cast<size_t>(size_), "reduce_scatter needs an input for each rank");
    check_reduction(output, how);
    Collective made = plain(type, output);
    const auto bytes = static_cast<int64_t>(bytes_of(output));
    made.to.assign(size_, bytes);
    made.from.assign(size_, bytes);
    made.pack = [inputs = aliases(inputs)] {
      Blobs blobs;
      for (const auto& input : inputs) blobs.push_back(packed(input.contiguous()));
      return blobs;
    };
    made.unpack = [output = alias_of(output), how](Blobs& blobs) { write(output, reduced(blobs, output.scalar_type(), how)); };
    return made;
  }

  Collective make_alltoall(const Tensors& inputs, const Tensors& outputs) const {
    TORCH_CHECK(inputs.size() == static_cast<size_t>(size_) && outputs.size() == inputs.size(), "all_to_all needs a tensor for each rank");
    Collective made = plain(OpType::ALLTOALL, inputs[0]);
    made.header.count = 0;  // ranks may send each other different amounts
    for (int i = 0; i < size_; ++i) {
      made.to[i] = static_cast<int64_t>(bytes_of(inputs[i]));
      made.from[i] = static_cast<int64_t>(bytes_of(outputs[i]));
    }
    made.pack = [inputs = aliases(inputs)] {
      Blobs blobs;
      for (const auto& input : inputs) blobs.push_back(packed(input));
      return blobs;
    };
    made.unpack = [outputs = aliases(outputs)](Blobs& blobs) { unpack_each(outputs, blobs); };
    return made;
  }

  static void write(const at::Tensor& tensor, const at::Tensor& flat) {
    std::memcpy(tensor.data_ptr(), flat.const_data_ptr(), bytes_of(tensor));
  }

  static void unpack_each(const Tensors& tensors, Blobs& blobs) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].is_contiguous()) unpack_into(tensors[i], blobs[i]);
      else tensors[i].copy_(at::from_blob(blobs[i].data(), tensors[i].sizes(), tensors[i].options()));
    }
  }

  // --- tensors

  static const at::Tensor& one(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only but got multiple. You are probably using multiple devices under one thread.");
    return tensors.back();
  }

  static at::Tensor real(const at::Tensor& tensor, const c10d::ReduceOp* how = nullptr) {
    if (!tensor.is_complex()) return tensor;
    const bool sums = !how || how->op_ == c10d::ReduceOp::SUM || how->op_ == c10d::ReduceOp::AVG || how->op_ == c10d::ReduceOp::PREMUL_SUM;
    TORCH_CHECK(sums, "all_reduce does not support this operation on complex tensors");
    return at::view_as_real(tensor);
  }

  static void check(const at::Tensor& tensor, bool p2p = false) {
    if (!tensor.is_cpu() || tensor.is_sparse()) C10_THROW_ERROR(ValueError, "Tensors must be CUDA and dense");
    if (tensor.is_contiguous(tensor.suggest_memory_format())) return;
    if (!p2p) C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
    if (!tensor.is_non_overlapping_and_dense()) C10_THROW_ERROR(ValueError, "Tensors for P2P must be non-overlapping and dense");
  }

  static void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& how) {
    using c10d::ReduceOp;
    const ReduceOp::RedOpType op = how.op_;
    if (op == ReduceOp::BAND) C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BAND with NCCL");
    if (op == ReduceOp::BOR) C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BOR with NCCL");
    if (op == ReduceOp::BXOR) C10_THROW_ERROR(ValueError, "Cannot use ReduceOp.BXOR with NCCL");
    if (op == ReduceOp::AVG && tensor.scalar_type() == at::kBool) C10_THROW_ERROR(TypeError, "Cannot use ReduceOp.AVG with boolean inputs");
  }

  static bool same_size(const Tensors& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) { return tensor.sizes() == tensors[0].sizes(); });
  }

  static at::Tensor flat_like(const Tensors& tensors) {
    std::vector<int64_t> sizes{static_cast<int64_t>(tensors.size())};
    sizes.insert(sizes.end(), tensors[0].sizes().begin(), tensors[0].sizes().end());
    return at::empty(sizes, at::TensorOptions().dtype(tensors[0].scalar_type()));
  }

  static Tensors join(Tensors left, const Tensors& right) {
    left.insert(left.end(), right.begin(), right.end());
    return left;
  }

  static Tensors aliases(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors)
      if (tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage()) all.push_back(alias_of(tensor));
    return all;
  }

  static size_t numel_of(const Tensors& tensors) {
    size_t sum = 0;
    for (const auto& tensor : tensors) sum += tensor.defined() ? static_cast<size_t>(tensor.numel()) : 0;
    return sum;
  }

  // A flat view of a part, without the dispatcher's help: the parts of a tensor may be in flight.
  static at::Tensor part(const at::Tensor& whole, int64_t at, int64_t length) {
    at::Tensor view = alias_of(whole);
    auto* impl = view.unsafeGetTensorImpl();
    impl->set_storage_offset(whole.storage_offset() + at);
    impl->set_sizes_contiguous({length});
    return view;
  }

  Tensors chunks(const at::Tensor& whole) const {
    Tensors all;
    const int64_t length = whole.numel() / size_;
    for (int i = 0; i < size_; ++i) all.push_back(part(whole, i * length, length));
    return all;
  }

  Tensors split(const at::Tensor& whole, const std::vector<int64_t>& sizes) const {
    if (sizes.empty()) {
      TORCH_CHECK_WITH(ValueError, whole.dim() && whole.size(0) % size_ == 0, "Tensor's dim 0 does not divide equally across group size");
      return chunks(whole);
    }
    TORCH_CHECK_WITH(ValueError, sizes.size() == static_cast<size_t>(size_), "Number of tensor splits not equal to group size");
    const int64_t row = whole.size(0) ? whole.numel() / whole.size(0) : 1;
    Tensors all;
    int64_t at = 0;
    for (const auto size : sizes) {
      all.push_back(part(whole, at * row, size * row));
      at += size;
    }
    TORCH_CHECK_WITH(ValueError, at == whole.size(0), "Split sizes doesn't match total dim 0 size");
    return all;
  }

  template <typename Options>
  static auto set_async(Options& options, bool async, int) -> decltype(options.asyncOp, void()) {
    options.asyncOp = async;
  }
  template <typename Options>
  static void set_async(Options&, bool, long) {}

  template <typename Options>
  static int64_t root_of(const Options& options) {
    return options.rootRank + options.rootTensor;
  }

 protected:
  const c10::intrusive_ptr<c10d::Store> store_;

 private:
  const c10::intrusive_ptr<Options> options_;
  std::vector<uint64_t> ranks_;
  const std::shared_ptr<GroupFacts> group_ = std::make_shared<GroupFacts>();
  bool timing_ = false, blocking_wait_ = false, eager_ = false, is_raw_ = false;
  uint64_t seq_collective_ = 0, seq_p2p_ = 0, op_id_ = 0, last_kernel_ = 0;
  int coalescing_ = 0;
  Coalesced coalesced_;
  std::mutex communicators_mutex_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  std::shared_ptr<Communicator> connecting_;
  std::unique_ptr<Watcher> watchdog_;
};

// The same class, for Python: without a uid.
class Backend2 : public Backend {
 public:
  using Backend::Backend;
#ifdef NCCL_LIKE_HOOKS
  bool supportsSplitting() const override { return true; }
#endif

  // All ranks of a communicator meet where it is split, without a time limit.
  void meet_to_split() {
    const std::atomic<bool> never{false};
    Mesh(*store_, c10::str("nccl_like/split/", splits_++), rank_, size_, std::chrono::hours(24), never);
  }

 private:
  int splits_ = 0;
};

}  // namespace nccl_like
