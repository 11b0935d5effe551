// The native engine: the module that commlens/capture/native_recorder.py drives. docs/native.md says how to build and use it.
//
// It has a boxed kernel at dispatch key BackendSelect for every c10d op that takes a process group, like commlens/tap/tap.py in
// Python. Once registered, the kernels stay, and pass every call through while no recorder is attached.
#include <torch/library.h>

#include "frame_values.hpp"
#include "kernels.hpp"
#include "waits.hpp"

namespace commlens {
namespace {

// A box and its recorder. They live as long as the process: a thread may be inside when recording stops.
struct Engine {
  Engine(const py::buffer& buffer, uint64_t capacity, uint64_t side_at, uint64_t side_size, uint64_t epoch)
      : map(buffer.request(true)), box(static_cast<char*>(map.ptr), capacity, side_at, side_size, epoch) {}

  Recorder& hot() {
    if (!recorder) throw std::runtime_error("this box has no recorder yet");
    return *recorder;
  }

  py::buffer_info map;  // keeps the mapping
  Box box;
  std::unique_ptr<Recorder> recorder;
};

OpSpec spec_of(const py::object& spec, size_t number) {
  OpSpec found;
  found.name = spec.attr("name").cast<std::string>();
  found.number = number;
  found.arguments = spec.attr("arguments").cast<size_t>();
  found.results = spec.attr("results").cast<size_t>();
  found.process_group = spec.attr("process_group").cast<int>();
  found.reduce_op = spec.attr("reduce_op").cast<int>();
  found.tensors = spec.attr("tensors").cast<std::vector<int>>();
  found.writes = spec.attr("writes").cast<std::vector<int>>();
  for (const char* name : {"root", "peer", "tag", "asynchronous"}) {
    const int at = spec.attr(name).cast<int>();
    if (at >= 0) found.words.push_back(at);
  }
  for (const int at : spec.attr("splits").cast<std::vector<int>>())
    if (at >= 0) found.words.push_back(at);
  return found;
}

// The memory of a map, which is never unmapped.
char* kept_map(const py::buffer& buffer, bool writable) { return static_cast<char*>((new py::buffer_info(buffer.request(writable)))->ptr); }

Indices indices(const VerifiedChannel& channel, const std::vector<uint64_t>& ranks) {
  Indices found;
  for (uint32_t i = 0; i < channel.ranks.size(); ++i)
    if (std::find(ranks.begin(), ranks.end(), channel.ranks[i]) != ranks.end()) found.push_back(i);
  return found;
}

py::dict board_layout() {
  py::dict values;
#define COMMLENS_BOARD(name) values[#name] = static_cast<uint64_t>(board::name)
  COMMLENS_BOARD(MAGIC); COMMLENS_BOARD(HEADER_SIZE); COMMLENS_BOARD(CHANNELS); COMMLENS_BOARD(ENTRIES); COMMLENS_BOARD(LAST_AT);
  COMMLENS_BOARD(SLOT_SIZE); COMMLENS_BOARD(BLOBS_SIZE); COMMLENS_BOARD(SIZE); COMMLENS_BOARD(ROUND_SHIFT); COMMLENS_BOARD(USED);
  COMMLENS_BOARD(HEAD); COMMLENS_BOARD(CLOSED); COMMLENS_BOARD(ACTIVE);
#undef COMMLENS_BOARD
  return values;
}

py::dict bells_layout() {
  py::dict values;
#define COMMLENS_BELLS(name) values[#name] = static_cast<uint64_t>(bells::name)
  COMMLENS_BELLS(FIRST_WORD); COMMLENS_BELLS(LAST_WORD); COMMLENS_BELLS(LONGEST_NS);
#undef COMMLENS_BELLS
  values["bell of 300"] = bells::bell_of(300);
  return values;
}

py::dict layout() {
  py::dict values;
#define COMMLENS_LAYOUT(name) values[#name] = static_cast<uint64_t>(name)
  COMMLENS_LAYOUT(HEADER_SIZE); COMMLENS_LAYOUT(RECORD_SIZE); COMMLENS_LAYOUT(RECORD_CRC_AT);
  COMMLENS_LAYOUT(NEXT_INDEX); COMMLENS_LAYOUT(SIDE_HEAD); COMMLENS_LAYOUT(STEPS); COMMLENS_LAYOUT(LOST); COMMLENS_LAYOUT(GAVE_UP);
  COMMLENS_LAYOUT(FLAG_COALESCED_MEMBER); COMMLENS_LAYOUT(FLAG_COALESCED_END); COMMLENS_LAYOUT(FLAG_CONCURRENT);
  COMMLENS_LAYOUT(FLAG_ENTERED); COMMLENS_LAYOUT(FLAG_ANY_SOURCE); COMMLENS_LAYOUT(FLAG_CAPTURE);
  COMMLENS_LAYOUT(TICK_NS); COMMLENS_LAYOUT(ENTERED); COMMLENS_LAYOUT(RETURNED); COMMLENS_LAYOUT(WAIT_BEGAN);
  COMMLENS_LAYOUT(WAIT_ENDED); COMMLENS_LAYOUT(DONE); COMMLENS_LAYOUT(OUTCOME); COMMLENS_LAYOUT(REDUCE_OP); COMMLENS_LAYOUT(SOURCE);
  COMMLENS_LAYOUT(DURATION); COMMLENS_LAYOUT(TAG_MASK);
  COMMLENS_LAYOUT(OUTCOME_NONE); COMMLENS_LAYOUT(OUTCOME_COMPLETED); COMMLENS_LAYOUT(OUTCOME_UNKNOWN);
  COMMLENS_LAYOUT(HOW_NOT_YET); COMMLENS_LAYOUT(HOW_RETURN); COMMLENS_LAYOUT(HOW_WAIT); COMMLENS_LAYOUT(HOW_POLL);
  COMMLENS_LAYOUT(HOW_NATIVE_RECORDER); COMMLENS_LAYOUT(HOW_UNKNOWN);
  COMMLENS_LAYOUT(BLOB_ALIGN); COMMLENS_LAYOUT(BLOB_MAX);
#undef COMMLENS_LAYOUT
  return values;
}

}  // namespace
}  // namespace commlens

PYBIND11_MODULE(commlens_native, module) {
  using namespace commlens;
  module.def("layout", &layout, "The layout that was compiled in, by the names of commlens.blackbox.layout.");
  module.def("board_layout", &board_layout, "The layout of boards, by the names of commlens.boards.board.");
  module.def("bells_layout", &bells_layout, "The layout of bells, by the names of commlens.boards.wakeup.");
  module.def("install", [](const py::list& specs, const py::object& slow) {
    std::vector<OpSpec> all;
    for (const auto& spec : specs) all.push_back(spec_of(py::reinterpret_borrow<py::object>(spec), all.size()));
    install(std::move(all), specs, slow);
  });
  module.def("set_python_listeners", [](bool collectives, bool waits) {
    python_subscribes.store(collectives);
    python_waits.store(waits);
  }, "Whether collectives are reported to subscribers in Python, and waits to listeners in Python.");
  module.def("run_fake_tensors_as", [](const py::object& keys) {
    fake_keys.store(keys.is_none() ? 0 : keys.cast<c10::DispatchKeySet>().raw_repr());
  });
  module.def("detach", [] { active.store(nullptr); });
  module.def("forked", [] {
    active.store(nullptr);
    cached_thread_id() = 0;
  }, "Stop recording in the child of a fork, which is not a rank.");
#if defined(COMMLENS_FRAMES)
  module.def("stack_key", &stack_key, "The calling stack as a key of a dictionary, valid as long as the code objects live.");
  module.def("local_values", [](const py::handle& code, const py::tuple& names) {
    return py::reinterpret_steal<py::object>(local_values(code.ptr(), names.ptr()));
  }, "The values of local variables in the innermost frame that runs a code object; None for missing ones.");
#endif
  module.def("tapped_wait", &tapped_wait, "Make a method wait for a class of Works; `slow` is the same in Python.");

  py::class_<InternedArgs, ArgsPtr>(module, "InternedArgs").def_property_readonly("python", [](const InternedArgs& args) {
    return py::reinterpret_borrow<py::object>(args.python.get());
  });
  py::class_<Token, TokenPtr>(module, "Token")
      .def_readonly("index", &Token::index)
      .def_readonly("offset", &Token::offset)
      .def_readonly("since", &Token::since)
      .def_readonly("thread", &Token::thread)
      .def_readonly("number", &Token::number)
      .def_readonly("tagged_number", &Token::tagged_number)
      .def_readonly("stack", &Token::stack)
      .def_readonly("backend_number", &Token::backend_number)
      .def_readonly("captured", &Token::captured)
      .def_property_readonly("has_result", [](const Token& token) { return static_cast<bool>(token.result); })
      .def_property_readonly("is_hooked", [](const Token& token) { return static_cast<bool>(token.flight); })
      .def_property_readonly("done_ns", [](const Token& token) { return token.flight ? token.flight->done.load() : 0; },
                             "When its backend's completion hook told that it completed; 0 while it has not.")
      .def_property_readonly("progress_ns", [](const Token& token) { return token.flight ? token.args->channel->hooks->progress() : 0; },
                             "When an op of its backend last completed, as the completion hook told; 0 for never.")
      .def("result", [](const Token& token) -> py::object {
        if (!token.result || !token.result->completed() || token.result->hasError()) return py::none();
        const c10::IValue value = token.result->value();
        return value.isInt() ? py::object(py::int_(value.toInt())) : py::object(py::int_(0));
      }, "How a message on a device ended, as torch's ErrorType; None while it has not.")
      .def_property_readonly("announced", [](const Token& token) -> py::object {
        const Announced& announced = token.announced;
        if (!announced.plan) return py::none();
        std::vector<uint64_t> absent;
        for (const uint32_t index : announced.absent) absent.push_back(announced.plan->channel->peers[index]->rank);
        return py::make_tuple(announced.plan->channel->slot, announced.number, announced.plan->extra, absent);
      }, "If it was announced by plan: slot and number on the board, reduce op, and the ranks that had not announced it.")
      .def_property_readonly("args", [](const Token& token) { return py::reinterpret_borrow<py::object>(token.args->python.get()); });

  py::class_<VerifiedChannel, std::shared_ptr<VerifiedChannel>>(module, "VerifiedChannel");
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan");
  using Ranks = std::vector<uint64_t>;
  py::class_<Exchange, std::unique_ptr<Exchange, py::nodelete>>(module, "Exchange")
      .def(py::init([](const py::buffer& board, const py::buffer& shared, uint64_t rank) {
        return std::unique_ptr<Exchange, py::nodelete>(new Exchange(kept_map(board, true), kept_map(shared, true), rank));
      }))
      .def("caught_up", [](Exchange& self, bool active, uint64_t refusals, std::optional<uint64_t> boards) {
        self.caught_up(active, refusals, boards.value_or(Exchange::ALL_BOARDS_SEEN));
      })
      .def("sample", &Exchange::sample)
      .def("forget", &Exchange::forget)
      .def_property_readonly("generation", &Exchange::generation)
      .def("add_peer", [](Exchange& self, uint64_t rank, const py::buffer& board) { self.add_peer(rank, kept_map(board, false)); })
      .def("channel", &Exchange::channel)
      .def("plan", [](Exchange&, std::shared_ptr<VerifiedChannel> channel, uint64_t generation, uint64_t round, uint64_t signature, uint64_t blob,
                      uint64_t extra, const Ranks& at_issue, const Ranks& at_wait) {
        auto plan = std::make_shared<Plan>();
        plan->channel = std::move(channel);
        plan->generation = generation;
        plan->round = round;
        plan->signature = signature;
        plan->blob = blob;
        plan->extra = extra;
        plan->at_issue = indices(*plan->channel, at_issue);
        plan->at_wait = indices(*plan->channel, at_wait);
        return plan;
      })
      .def("agree", &Exchange::agree)
      // announcements made by Python, with the same board and bells
      .def("announce", [](Exchange& self, uint64_t slot, uint64_t number, uint64_t signature, uint64_t blob, uint64_t extra) {
        self.board().announce(slot, {number, signature, blob, extra});
      })
      .def("withdraw", [](Exchange& self, uint64_t slot, uint64_t number) { self.board().withdraw(slot, number); })
      .def("ring", [](Exchange& self, const Ranks& peers) { self.bells().ring(peers); })
      .def("wake", [](Exchange& self, const Ranks& ranks) { self.bells().wake(ranks); })
      .def("listen", [](Exchange& self, uint64_t peer, uint64_t thread) { return self.bells().listen(peer, thread); })
      .def("sleep", [](Exchange& self, uint64_t peer, uint64_t heard) {
        NoGil no_gil;
        self.bells().sleep(peer, heard, bells::LONGEST_NS);
      })
      .def("awake", [](Exchange& self, uint64_t thread) { self.bells().awake(thread); });

  py::class_<Engine, std::unique_ptr<Engine, py::nodelete>>(module, "Engine")
      .def(py::init([](const py::buffer& map, uint64_t capacity, uint64_t side_at, uint64_t side_size, uint64_t epoch) {
        return std::unique_ptr<Engine, py::nodelete>(new Engine(map, capacity, side_at, side_size, epoch));
      }))
      // the box
      .def("append", [](Engine& self, const py::bytes& payload) { return self.box.append(payload.cast<std::string_view>()); })
      .def("next_index", [](Engine& self) { return self.box.next_index(); })
      .def("seen", [](Engine& self, uint64_t index) { self.box.seen(index); })
      .def_property_readonly("last_index", [](Engine& self) { return self.box.last_index(); })
      .def_property_readonly("side_floor", [](Engine& self) { return self.box.side_floor(); })
      // the recorder
      .def("record_for", [](Engine& self, const py::object& host, bool cpp_stack, bool timing) {
        self.recorder = std::make_unique<Recorder>(self.box, host, cpp_stack, timing);
      })
      .def("attach", [](Engine& self) { active.store(&self.hot(), std::memory_order_release); })
      .def("verify", [](Engine& self, Exchange* by) { self.hot().verification.use(by); }, py::arg("by").none(true))
      .def("verify_wait", [](Engine& self, const TokenPtr& token) { self.hot().verification.before_wait(token); })
      .def("sweep", [](Engine& self) { return self.hot().completion.sweep(); })
      .def("set_capturing", [](Engine& self, bool capturing) { self.hot().capturing.store(capturing, std::memory_order_relaxed); })
      .def("take_enqueued", [](Engine& self) {
        py::list tokens;
        for (const auto& token : self.hot().completion.take_enqueued()) tokens.append(token);
        return tokens;
      })
      .def("held", [](Engine& self) { return self.hot().completion.held(); })
      .def("release", [](Engine& self) { self.hot().completion.release(); })
      .def("handled", [](Engine& self, const py::object& work) { self.hot().completion.handled(work.cast<c10d::Work*>()); })
      .def("unwaited", [](Engine& self) {
        py::dict found;
        for (const auto& [stack, times] : self.hot().completion.unwaited()) found[py::int_(stack)] = times;
        return found;
      }, "The asynchronous calls whose Works nobody waited for: by the position of their stack, how many.")
      .def("forget_group", [](Engine& self, uintptr_t group) { self.hot().args_table.forget_group(reinterpret_cast<const void*>(group)); })
      .def("forget_groups", [](Engine& self) { self.hot().args_table.forget_groups(); })
      .def("renamed", [](Engine& self, const py::object& channel) { self.hot().args_table.renamed(channel.ptr()); })
      .def("wait_begins", [](Engine& self, const py::object& work) -> TokenPtr {
        return self.hot().completion.wait_begins(work.cast<c10d::Work*>(), work.ptr());
      })
      .def("tensor_wait_begins", [](Engine& self, const at::Tensor& tensor) { return self.hot().completion.tensor_wait_begins(tensor); })
      .def("wait_ended", [](Engine& self, const TokenPtr& token, const py::object& error, const py::object& work) {
        const c10d::Work* waited = work.is_none() ? nullptr : work.cast<c10d::Work*>();
        self.hot().completion.wait_ended(token, error.is_none() ? nullptr : &error, waited);
      })
      .def("cpp_waits", [](Engine& self) { self.hot().completion.cpp_waits(); })
      .def("waited_in_cpp", [](Engine& self) { self.hot().completion.waited_in_cpp(); })
      .def("coalescing_starts", [](Engine& self) { self.hot().coalesced_groups.start(); })
      .def("coalescing_ends", [](Engine& self) -> py::object {
        auto group = self.hot().coalesced_groups.take(this_thread());
        if (!group) return py::none();
        return py::make_tuple(group->first, self.hot().args_table.channel_blob(*group->first->channel), group->number, group->id, group->members);
      })
      .def("stack_position", [](Engine& self, int skip) { return self.hot().stack_position(skip); })
      .def("group_token", [](Engine& self, const py::object& described, const ArgsPtr& first, uint64_t index, uint64_t offset,
                             uint64_t since, uint64_t number) { return self.hot().group_token(described, first, index, offset, since, number); })
      .def("group_returned", [](Engine& self, const TokenPtr& token, const py::object& work) {
        self.hot().completion.returned(token, work.is_none() ? WorkPtr() : work.cast<WorkPtr>());
      });
}
