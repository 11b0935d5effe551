"""A backend for tests that behaves on tensors of the CPU as ProcessGroupNCCL does on a GPU.
README.md says how to use it.

``build()`` compiles it once, ``register()`` makes it known to torch.distributed. The other
functions look into the simulated device.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAME = "nccl_like"
MODULE = "nccl_like_native"
LIBRARY = "NCCL_LIKE_LIBRARY"  # the built library, for processes that shall not look for it
ENGINE = "NCCL_LIKE_ENGINE"
NCCL2 = "nccl2"  # the engine that torch 2.15 calls "nccl"
CACHE = "COMMLENS_TEST_NATIVE"  # the folder in which `make test` keeps native builds
TIMEOUT_S = 900
COMPILER_FAILED = "The compiler failed on nccl_like"
# the backends whose groups use it, where it takes over
OURS = (NAME, "undefined", "None", "gloo", "nccl", "cpu:gloo,cuda:nccl")


def build() -> Path:
    """Return the library, compiled for this torch and Python if it was not yet.

    Raises:
        commlens.errors.NativeEngineError: there is no compiler, or it fails.
    """
    with _commlens():
        from commlens.errors import NativeEngineError
        from commlens.native import build as native
        from commlens.native.cache import identity
    compiler = native.find_compiler(os.environ)
    command = [
        *compiler,
        str(HERE / "backend.cpp"),
        f"-I{HERE / 'include'}",
        *native.flags(),
        "-DFMT_HEADER_ONLY",
        "-fvisibility=hidden",
    ]
    about = repr(
        (sorted(identity().items()), native.compiler_version(compiler), command[len(compiler) :])
    )
    digest = hashlib.sha256(
        about.encode() + b"".join(path.read_bytes() for path in sources())
    ).hexdigest()[:16]
    folder = Path(
        os.environ.get(CACHE) or Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    ).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{MODULE}-{digest}.so"
    with (folder / f".{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / library.name
            ended = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=TIMEOUT_S
            )
            if ended.returncode:
                lines = [
                    line for line in ended.stderr.splitlines() if "error" in line
                ] or ended.stderr.splitlines()[-1:]
                raise NativeEngineError(
                    f"{COMPILER_FAILED}: {lines[0] if lines else ended.returncode}"
                )
            made.replace(library)
    return library


def why_not(engine: str = "nccl") -> str:
    """Say why it cannot be used here as an engine; empty if it can."""
    if _version() < (2, 8):
        return "the emulation follows ProcessGroupNCCL of torch 2.8 and later"
    if engine == NCCL2 and _version() < (2, 15):
        return "nccl2 needs the hooks of torch 2.15"
    return _why_not_built()


def variables(engine: str) -> dict[str, str]:
    """Return the environment that puts a rank on the emulation of an engine: ``nccl`` or
    ``nccl2``.
    """
    return {"NCCL_LIKE": "1", ENGINE: engine, LIBRARY: str(build())}


def _version() -> tuple[int, ...]:
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _why_not_built() -> str:
    with _commlens():
        from commlens.errors import NativeEngineError
    try:
        build()
    except NativeEngineError as error:
        if COMPILER_FAILED in str(error):
            raise
        return f"the backend that behaves as NCCL does cannot be built here: {error}"
    return ""


def sources() -> list[Path]:
    return sorted([*HERE.glob("*.cpp"), *HERE.glob("*.hpp"), *HERE.glob("include/**/*.hpp")])


@contextlib.contextmanager
def _commlens() -> Iterator[None]:
    """commlens importable, also in a program that does not have it."""
    source = str(HERE.parents[1] / "src")
    sys.path.append(source)
    try:
        yield
    finally:
        sys.path.remove(source)


@functools.cache
def native() -> Any:
    """The compiled module."""
    import torch.distributed  # noqa: F401 - its types must be known first

    path = Path(os.environ.get(LIBRARY) or build())
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def register(*, take_over: bool = False) -> None:
    """Make the backend ``nccl_like`` known to torch.distributed in this process.

    Args:
        take_over: groups of the backends gloo and nccl use it, and those of the default backend.
            Only ``cpu:gloo`` stays gloo.
    """
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    made = native()
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    if hasattr(made, "_dump_nccl_trace"):
        # _dump_fr_trace stays what it is in a build for CUDA as well: the recorder of gloo, in
        # libtorch_cpu.
        for name in ("_dump_nccl_trace", "_dump_nccl_trace_json"):
            setattr(_distributed_c10d, name, getattr(made, name))
    _settings_from_environment(made, torch.__version__)
    _wait_outside_the_dispatcher(torch, made)
    _make_cuda_graphs(torch, made)
    atexit.register(made.stop)
    if take_over:
        _take_over(dist)


def _create(options: Any, backend_options: Any) -> Any:
    timeout = options.timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    ranks = list(options.global_ranks_in_group)
    if os.environ.get(ENGINE) == NCCL2:
        # As torch does for nccl2: new_group then splits the communicator of the default group.
        import torch

        options.process_group.bound_device_id = torch.device("cpu", 0)
        if options.split_from is not None:
            options.split_from.perform_nocolor_split(None)
    return native().create(
        options.store, options.group_rank, options.group_size, seconds, options.group_id, ranks
    )


def _settings_from_environment(made: Any, version: str) -> None:
    old = tuple(int(part) for part in version.split(".")[:2]) < (2, 8)
    is_nccl2 = os.environ.get(ENGINE) == NCCL2
    made.set_nccl2(is_nccl2)
    made.set_sync_returns_work(
        os.environ.get("NCCL_LIKE_SYNC_RETURNS_WORK", "1" if old or is_nccl2 else "0") == "1"
    )
    made.set_eager(os.environ.get("NCCL_LIKE_EAGER") == "1")
    made.set_watchdogs_stuck(os.environ.get("NCCL_LIKE_STUCK_WATCHDOG") == "1")
    made.set_peer_death_is_an_error(os.environ.get("NCCL_LIKE_PEER_DEATH") == "error")
    made.set_device_delay(float(os.environ.get("NCCL_LIKE_DELAY_S", "0")))


def _wait_outside_the_dispatcher(torch: Any, made: Any) -> None:
    """What reads memory without an operator, or waits for the stream."""

    def wait_first(name: str) -> None:
        method = getattr(torch.Tensor, name)

        @functools.wraps(method)
        def of_finished_memory(self: Any, *arguments: Any, **named: Any) -> Any:
            if type(self) in (torch.Tensor, torch.nn.Parameter):
                made.wait_for_memory(self)
            return method(self, *arguments, **named)

        setattr(torch.Tensor, name, of_finished_memory)

    for name in ("numpy", "tolist", "cpu"):
        wait_first(name)
    torch.cpu.synchronize = lambda device=None: made.synchronize()


def _make_cuda_graphs(torch: Any, made: Any) -> None:
    """``torch.cuda.CUDAGraph`` on the simulated device: a tool that patches its methods meets them
    here.
    """

    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._graph = made.Graph()
            self._leave_out = contextlib.ExitStack()

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if os.environ.get(ENGINE) == NCCL2:
                self._leave_out.enter_context(_hooks_leave_out(torch, made))
            self._graph.begin(capture_error_mode == "global")

        def capture_end(self) -> None:
            self._graph.end()
            self._leave_out.close()

        def replay(self) -> None:
            self._graph.replay()

    torch.cuda.graphs.CUDAGraph = torch.cuda.CUDAGraph = CUDAGraph


@contextlib.contextmanager
def _hooks_leave_out(torch: Any, made: Any) -> Iterator[None]:
    """torch's hooks record nothing while a graph is captured. They ask the stream, which on a CPU
    never captures: here hooks before and after theirs switch their recorder off and on.
    """
    first, last = -(2**62), 2**62
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    for group in groups:
        group.register_pre_hook(first, lambda _: made.set_hooks_recorder(False))
        group.register_pre_hook(last, lambda _: made.set_hooks_recorder(True))
    try:
        yield
    finally:
        for group in groups:
            group.unregister_pre_hook(first)
            group.unregister_pre_hook(last)


def _take_over(dist: Any) -> None:
    from torch.distributed import distributed_c10d as module

    original = module._new_process_group_helper
    default_timeout = module._get_default_timeout

    @functools.wraps(original)
    def with_our_backend(
        size: int, rank: int, ranks: Any, backend: Any, *arguments: Any, **named: Any
    ) -> Any:
        if str(backend) in OURS:
            backend = dist.Backend(NAME)
        return original(size, rank, ranks, backend, *arguments, **named)

    def ten_minutes(backend: Any) -> timedelta:  # NCCL's default
        return (
            timedelta(minutes=10)
            if backend is None or str(backend) in OURS
            else default_timeout(backend)
        )

    module._new_process_group_helper = with_our_backend
    module._get_default_timeout = ten_minutes


def synchronize() -> None:
    """Wait as ``torch.cuda.synchronize()`` does: for everything that the compute stream waits for."""
    native().synchronize()


def queries() -> int:
    """The number of event queries by others than the watchdogs."""
    return int(native().queries())


def works_alive() -> int:
    """The number of Works that somebody holds."""
    return int(native().works_alive())


def pending() -> int:
    """The number of kernels that were launched and are not done."""
    return int(native().pending())


def capturing(on: bool) -> None:
    """Whether an event query ends the process with status 99, as it ruins a capture in the global
    mode.
    """
    native().set_capturing(on)


@contextlib.contextmanager
def capture(*, mode: str = "global") -> Iterator[Any]:
    """Capture the collectives of the block as a graph; ``graph.replay()`` launches them."""
    import torch

    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=mode)
    try:
        yield graph
    finally:
        graph.capture_end()


def launch_kernel(seconds: float | None = None) -> None:
    """Occupy the compute stream for so long, or for ever: until ``end_kernels()``."""
    native().launch_kernel(seconds)


def end_kernels() -> None:
    """End the compute kernels under way."""
    native().end_kernels()


def device_delay(seconds: float) -> None:
    """Make every communication kernel take so much longer."""
    native().set_device_delay(seconds)
