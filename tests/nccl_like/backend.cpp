// A backend for tests that behaves on tensors of the CPU as ProcessGroupNCCL does on a GPU. README.md says how to use it.
#include "backend.hpp"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace nccl_like {
namespace {

// Kernels captured once, launched again at each replay.
struct Graph {
  std::vector<KernelPtr> kernels;
  bool forbids_queries = true;

  void begin(bool global) {
    TORCH_CHECK(!Device::get().begin_capture(&kernels), "a graph is captured already");
    forbids_queries = global;
    if (global) capture_forbids_queries.store(true);
  }
  void end() {
    Device::get().begin_capture(nullptr);
    if (forbids_queries) capture_forbids_queries.store(false);
  }
  void replay() {
    for (const auto& kernel : kernels) Device::get().launch(kernel->again(), true);
  }
};

void launch_kernel(std::optional<double> seconds) {
  auto kernel = std::make_shared<Kernel>();
  kernel->run = [seconds, ends = Device::get().compute_ends()](const Kernel&) {
    auto& device = Device::get();
    const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds.value_or(0)));
    while ((!seconds || Clock::now() < until) && device.compute_ends() == ends && !device.is_stopping())
      std::this_thread::sleep_for(Milliseconds(1));
  };
  Device::get().launch(kernel, true);
}

// At the end of the process: aborts what is in flight, and ends every thread.
void stop() {
  std::set<Backend*> backends;
  {
    std::lock_guard<std::mutex> lock(Backend::all_mutex());
    backends = Backend::all();
  }
  for (auto* backend : backends) backend->abort();
  Device::get().stop();
  for (auto* backend : backends) backend->stop_threads();
}

c10::intrusive_ptr<Backend> create(
    c10::intrusive_ptr<c10d::Store> store, int rank, int size, double timeout_s, const std::string& name, const std::vector<int64_t>& ranks) {
  const Milliseconds timeout(static_cast<int64_t>(timeout_s * 1000));
  const std::vector<uint64_t> all(ranks.begin(), ranks.end());
  auto backend = is_nccl2.load() ? c10::intrusive_ptr<Backend>(c10::make_intrusive<Backend2>(std::move(store), rank, size, timeout, name, all))
                                 : c10::make_intrusive<Backend>(std::move(store), rank, size, timeout, name, all);
  backend->connect_if_eager();
  return backend;
}

// A communicator that torch does not know, as pynccl, CuPy and C++ libraries make them.
c10::intrusive_ptr<Backend> communicator(c10::intrusive_ptr<c10d::Store> store, int rank, int size) {
  auto made = c10::make_intrusive<Backend>(std::move(store), rank, size, std::chrono::hours(24), "", std::vector<uint64_t>());
  made->leave_torch();
  return made;
}

}  // namespace
}  // namespace nccl_like

TORCH_LIBRARY_IMPL(aten, BackendSelect, library) { nccl_like::install_interception(library); }

PYBIND11_MODULE(nccl_like_native, module) {
  using namespace nccl_like;
  using no_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Backend, c10::intrusive_ptr<Backend>, c10d::Backend>(module, "ProcessGroupNCCL")
      .def_property_readonly("uid", &Backend::uid)
      .def_property_readonly("options", &Backend::getBackendOptions)
      .def("_set_default_timeout", [](Backend& self, Milliseconds timeout) { self.setTimeout(timeout); }, no_gil())
      .def("abort", [](Backend& self) { self.abort(); }, no_gil())
      .def("shutdown", [](Backend& self) { self.shutdown(); }, no_gil());
  // of one base with the class above: Python sees no uid
  py::class_<Backend2, c10::intrusive_ptr<Backend2>, c10d::Backend>(module, "ProcessGroupNCCL2")
      .def_property_readonly("options", [](Backend2& self) { return self.getBackendOptions(); })
      .def("_set_default_timeout", [](Backend2& self, Milliseconds timeout) { self.setTimeout(timeout); }, no_gil())
      .def("abort", [](Backend2& self) { self.abort(); }, no_gil())
      .def("shutdown", [](Backend2& self) { self.shutdown(); }, no_gil())
      .def("perform_nocolor_split", [](Backend2& self, const py::object&) {
        py::gil_scoped_release no_gil;
        self.meet_to_split();
      });
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay, no_gil());
  module.def("create", &create, no_gil());
  module.def("communicator", &communicator, no_gil());
  module.def("wait_for_memory", [](const at::Tensor& tensor) { wait_for_memory(tensor); }, no_gil());
  module.def("synchronize", &synchronize, no_gil());
  module.def("launch_kernel", &launch_kernel, no_gil());
  module.def("end_kernels", [] { Device::get().end_compute_kernels(); });
  module.def("pending", [] { return Device::get().pending(); });
  module.def("queries", [] { return event_queries.load(); });
  module.def("works_alive", [] { return works_alive.load(); });
  module.def("stop", &stop, no_gil());
  module.def("set_device_delay", [](double seconds) { Device::get().delay_s.store(seconds); });
  module.def("set_capturing", [](bool on) { capture_forbids_queries.store(on); });
  module.def("set_sync_returns_work", [](bool on) { sync_returns_work.store(on); });
  module.def("set_works_have_keys", [](bool on) { works_have_keys.store(on); });
  module.def("set_nccl2", [](bool on) { is_nccl2.store(on); });
#ifdef NCCL_LIKE_HOOKS
  module.def("set_hooks_recorder", [](bool on) { c10d::getFlightRecorder("nccl2")->enabled_ = on; });
#endif
  module.def("set_eager", [](bool on) { connects_eagerly.store(on); });
  module.def("set_watchdogs_stuck", [](bool on) { watchdogs_are_stuck.store(on); });
  module.def("set_peer_death_is_an_error", [](bool on) { peer_death_is_an_error.store(on); });
#ifdef NCCL_LIKE_RECORDS
  module.def(
      "_dump_nccl_trace",
      [](bool collectives, bool stacks, bool only_active) { return py::bytes(dump(collectives, stacks, only_active)); },
      py::arg("includeCollectives") = true, py::arg("includeStackTraces") = true, py::arg("onlyActive") = false);
  module.def(
      "_dump_nccl_trace_json", [](bool collectives, bool only_active) { return py::bytes(dump_json(collectives, only_active)); },
      py::arg("includeCollectives") = true, py::arg("onlyActive") = false);
#endif
}
