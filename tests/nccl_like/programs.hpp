// What the communication kernels do, in the device thread: exchange headers with the ranks involved, then move and reduce data.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <set>

#include "device.hpp"

namespace nccl_like {

using Blobs = std::vector<std::string>;  // one for each rank of the communicator

struct Collective {
  Header header;
  at::ScalarType type = at::kByte;
  std::vector<int64_t> to, from;  // bytes, for each rank
  std::function<Blobs()> pack;
  std::function<void(Blobs&)> unpack;
};

struct PointToPoint {  // a send or a receive
  bool is_send = false;
  int peer = 0;
  at::Tensor tensor;
};

// Members of a group run as one kernel: its collectives one after the other, then its sends and receives all at once.
struct Program {
  std::vector<Collective> collectives;
  std::vector<PointToPoint> messages;
  std::vector<NcclCall> calls;
};

inline const char* nccl_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "ncclFloat32";
    case at::kDouble: return "ncclFloat64";
    case at::kHalf: return "ncclFloat16";
    case at::kBFloat16: return "ncclBfloat16";
    case at::kInt: return "ncclInt32";
    case at::kLong: return "ncclInt64";
    case at::kChar: return "ncclInt8";
    default: return "ncclUint8";
  }
}

// torch makes all_to_all, gather and scatter of sends and receives.
inline std::vector<NcclCall> nccl_calls(const Collective& of) {
  using c10d::OpType;
  const auto* type = nccl_type(of.type);
  const auto count = static_cast<size_t>(of.header.count);
  const auto root = static_cast<int>(of.header.root);
  switch (static_cast<OpType>(of.header.kind)) {
    case OpType::ALLREDUCE: return {{"AllReduce", count, type}};
    case OpType::BROADCAST: return {{"Broadcast", count, type, root}};
    case OpType::REDUCE: return {{"Reduce", count, type, root}};
    case OpType::ALLGATHER:
    case OpType::_ALLGATHER_BASE: return {{"AllGather", count, type}};
    case OpType::REDUCE_SCATTER:
    case OpType::_REDUCE_SCATTER_BASE: return {{"ReduceScatter", count, type}};
    default: break;
  }
  std::vector<NcclCall> calls;
  const auto size = static_cast<int64_t>(c10::elementSize(of.type));
  for (size_t peer = 0; peer < of.to.size(); ++peer) {
    if (of.to[peer]) calls.push_back({"Send", static_cast<size_t>(of.to[peer] / size), type, -1, static_cast<int>(peer)});
    if (of.from[peer]) calls.push_back({"Recv", static_cast<size_t>(of.from[peer] / size), type, -1, static_cast<int>(peer)});
  }
  return calls;
}

inline size_t bytes_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()) * tensor.element_size(); }

inline std::string packed(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.storage().nbytes() >= bytes_of(tensor) || !tensor.numel(), "the memory of a tensor in flight was freed");
  return std::string(static_cast<const char*>(tensor.const_data_ptr()), bytes_of(tensor));
}

inline void unpack_into(const at::Tensor& tensor, const std::string& blob) {
  TORCH_CHECK(tensor.storage().nbytes() >= blob.size() || blob.empty(), "the memory of a tensor in flight was freed");
  std::memcpy(tensor.data_ptr(), blob.data(), blob.size());
}

inline at::Tensor reduced(Blobs& blobs, at::ScalarType type, const c10d::ReduceOp& how) {
  using c10d::ReduceOp;
  const auto options = at::TensorOptions().dtype(type);
  std::vector<at::Tensor> all;
  for (auto& blob : blobs) all.push_back(at::from_blob(blob.data(), {static_cast<int64_t>(blob.size() / c10::elementSize(type))}, options));
  const ReduceOp::RedOpType op = how.op_;
  if (op == ReduceOp::PREMUL_SUM) {
    const auto* by = static_cast<const c10d::NCCLPreMulSumSupplement*>(how.supplement_.get());
    for (auto& each : all) by->tensor_factor.defined() ? each.mul_(by->tensor_factor) : each.mul_(by->double_factor);
  }
  at::Tensor sum = all[0];
  for (size_t i = 1; i < all.size(); ++i) {
    if (op == ReduceOp::MIN) sum = at::minimum(sum, all[i]);
    else if (op == ReduceOp::MAX || type == at::kBool) sum = at::maximum(sum, all[i]);
    else if (op == ReduceOp::PRODUCT) sum = sum.mul(all[i]);
    else sum = sum.add(all[i]);
  }
  if (op == ReduceOp::AVG) {
    const auto ranks = static_cast<int64_t>(all.size());
    sum = at::isIntegralType(type, true) ? at::div(sum, ranks, "trunc").to(type) : sum.div(static_cast<double>(ranks));
  }
  return sum.to(type).contiguous();
}

// Runs one program. Returns early if the communicator is aborted or the process ends.
class Run {
 public:
  Run(Communicator& communicator) : communicator_(communicator), mesh_(*communicator.mesh) {}

  void operator()(const Program& program) {
    for (const auto& collective : program.collectives)
      if (!run(collective)) return;
    run(program.messages);
  }

 private:
  bool is_over() const { return communicator_.aborted.load() || Device::get().is_stopping(); }

  template <typename Condition>
  bool until(const Condition& condition) {
    while (!condition()) {
      if (is_over()) return false;
      mesh_.pump();
    }
    return !is_over();
  }

  bool spin_for_ever() {
    return until([] { return false; });
  }

  bool run(const Collective& collective) {
    const int size = mesh_.size(), me = mesh_.rank();
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      Header mine = collective.header;
      mine.to_you = collective.to[peer];
      mine.from_you = collective.from[peer];
      mesh_.post(peer, Message::COLLECTIVE, &mine, sizeof mine);
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      if (!until([&] { return mesh_.has(peer, Message::COLLECTIVE); })) return false;
      Header mine = collective.header;
      mine.to_you = collective.to[peer];
      mine.from_you = collective.from[peer];
      const auto theirs = mesh_.take(peer, Message::COLLECTIVE);
      if (!mine.agrees_with(*reinterpret_cast<const Header*>(theirs.data()))) return spin_for_ever();
    }
    Blobs blobs = collective.pack();
    for (int peer = 0; peer < size; ++peer)
      if (peer != me) mesh_.post(peer, Message::DATA, blobs[peer].data(), blobs[peer].size());
    for (int peer = 0; peer < size; ++peer) {
      if (peer == me) continue;
      if (!until([&] { return mesh_.has(peer, Message::DATA); })) return false;
      blobs[peer] = mesh_.take(peer, Message::DATA);
    }
    if (!until([&] { return mesh_.all_sent(); })) return false;
    collective.unpack(blobs);
    return true;
  }

  static Header header_of(const PointToPoint& message) {
    Header header;
    header.kind = static_cast<int64_t>(c10d::OpType::SEND);
    (message.is_send ? header.to_you : header.from_you) = static_cast<int64_t>(bytes_of(message.tensor));
    return header;
  }

  // Each side says that it is there; then the sender sends. Messages of one direction between two ranks keep their order.
  bool run(const std::vector<PointToPoint>& messages) {
    enum class State { WAITS, MATCHED, DONE, NEVER };
    std::vector<State> states(messages.size(), State::WAITS);
    for (const auto& message : messages) {
      const Header mine = header_of(message);
      mesh_.post(message.peer, message.is_send ? Message::SEND : Message::RECV, &mine, sizeof mine);
    }
    const auto advance = [&] {
      bool all_done = true;
      std::set<std::pair<int, bool>> blocked;  // a peer and a direction, in which an earlier message waits
      for (size_t i = 0; i < messages.size(); ++i) {
        const auto& message = messages[i];
        const auto lane = std::make_pair(message.peer, message.is_send);
        const auto other = message.is_send ? Message::RECV : Message::SEND;
        if (states[i] == State::WAITS && !blocked.count(lane) && mesh_.has(message.peer, other)) {
          const auto theirs = mesh_.take(message.peer, other);
          const bool agree = header_of(message).agrees_with(*reinterpret_cast<const Header*>(theirs.data()));
          states[i] = agree ? State::MATCHED : State::NEVER;
        }
        if (states[i] == State::MATCHED && !blocked.count(lane)) {
          if (message.is_send) {
            const auto data = packed(message.tensor);
            mesh_.post(message.peer, Message::DATA, data.data(), data.size());
            states[i] = State::DONE;
          } else if (mesh_.has(message.peer, Message::DATA)) {
            unpack_into(message.tensor, mesh_.take(message.peer, Message::DATA));
            states[i] = State::DONE;
          }
        }
        if (states[i] != State::DONE) {
          blocked.insert(lane);
          all_done = false;
        }
      }
      return all_done && mesh_.all_sent();
    };
    return until(advance);
  }

  Communicator& communicator_;
  Mesh& mesh_;
};

}  // namespace nccl_like
