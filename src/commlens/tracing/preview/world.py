"""A fake world: one process that plays any rank of a world of any size, on torch's fake backend.

Programs run unchanged: whatever backend, store or launcher they use, they get the fake backend and
this world. For example, ::

    with FakeWorld(world_size=64, rank=9):
        dist.init_process_group("nccl")    # the fake backend; RANK=9, LOCAL_RANK=1, ...
        dist.get_backend()                 # "nccl"
        dist.all_reduce(x)                 # returns at once, x is unchanged

This module and ``objects.py`` fill the gaps of the backend; ``cuda.py`` and ``tensors.py`` replace
devices and tensors.

Tried on torch 2.6.0, 2.13.0 and 2.15.0. Filled gaps: futures of collectives (DDP's hooks assert on
their value), objects from other ranks, ``monitored_barrier``, ``recv`` from any rank,
``split_group``, stores and barriers on them, ``mp.spawn``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from commlens.errors import CommandError
from commlens.tap import tap
from commlens.tracing.patches import Patches, called_by_torch
from commlens.tracing.preview import backend
from commlens.tracing.preview.cuda import FakeCuda
from commlens.tracing.preview.objects import Key, Message, Objects, deliver_votes
from commlens.tracing.preview.store import FakeStore, store_class
from commlens.tracing.preview.tensors import FakeTensors

FAKE = "fake"


class FakeWorld:
    """A context in which this process is one rank of the world. Afterwards the process is as
    before.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        *,
        ranks_per_node: int = 8,
        fake_tensors: bool = False,
        learned: Mapping[Key, Message | None] | None = None,
        stop_at: Key | None = None,
    ) -> None:
        """Describe the world.

        Args:
            world_size: number of ranks.
            rank: that this process plays.
            ranks_per_node: determines ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
            fake_tensors: use tensors without memory.
            learned: objects from other ranks, from earlier runs.
            stop_at: stop when this object is sent: another rank needs it.
        """
        self.world_size = world_size
        self.rank = rank
        self.local_world_size = min(ranks_per_node, world_size)
        self.local_rank = rank % ranks_per_node
        self.objects = Objects(rank, learned or {}, stop_at)
        self.tensors = FakeTensors() if fake_tensors else None
        self.before_destroy: Any = None  # called before the groups are destroyed
        self._cuda = FakeCuda(self.local_rank, self.local_world_size)
        self._futures = _Futures()
        self._patches = Patches()
        self._cleanup = contextlib.ExitStack()
        self._store = FakeStore(world_size)
        # by group: the backend that the program asked for
        self._wanted_backends: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._pipelining_patched = False
        self._node = rank // ranks_per_node

    def __enter__(self) -> FakeWorld:
        if dist.is_initialized():
            raise CommandError(
                "This process already has a process group, but a preview creates its own: call"
                " preview() before init_process_group, after destroy_process_group, or in another"
                " process."
            )
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend

        try:
            self._install()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def blind(self) -> list[str]:
        """The limits of this run, in sentences."""
        lines = list(self.tensors.mode.invented_at) if self.tensors is not None else []
        more = f" and {len(lines) - 5} more lines" if len(lines) > 5 else ""
        invented = (
            "The program read values of fake tensors, which were invented:"
            f" {', '.join(lines[:5])}{more}."
        )
        return [invented] if lines else []

    def _install(self) -> None:
        """Make the world, and note how to undo each part: the last one first."""
        later = self._cleanup.callback
        clear_caches()
        later(clear_caches)
        later(os.environ.update, dict(os.environ))
        later(os.environ.clear)
        later(setattr, sys, "excepthook", sys.excepthook)
        later(torch.set_rng_state, torch.get_rng_state())
        os.environ.update(
            {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(self.local_rank),
                "LOCAL_WORLD_SIZE": str(self.local_world_size),
                "GROUP_RANK": str(self._node),
                "ROLE_RANK": str(self.rank),
                "ROLE_WORLD_SIZE": str(self.world_size),
                "GROUP_WORLD_SIZE": str(-(-self.world_size // self.local_world_size)),
                "NODE_RANK": str(self._node),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "preview",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
            }
        )
        later(self._patches.restore)
        self._patch_groups()
        self._fill_gaps()
        self.objects.install(self._patches)
        later(self.objects.remove)
        later(backend.install())
        tap.attach(self._futures)
        later(tap.detach, self._futures)
        # compiled code issues the same collectives, but takes minutes to compile
        if hasattr(torch.compiler, "set_stance"):
            later(torch.compiler.set_stance("force_eager").__exit__, None, None, None)
        self._cuda.install(self._patches)
        later(self._cuda.remove)
        later(lambda: c10d.destroy_process_group() if dist.is_initialized() else None)
        if self.tensors is not None:
            self.tensors.install(self._patches)
            later(self.tensors.remove)
        self._patches.replace_aliases()
        if self.tensors is not None:
            self._cleanup.enter_context(self.tensors.mode)

    # --- groups

    def _patch_groups(self) -> None:
        wrap = self._patches.wrap
        self._patches.wrap_named(c10d, "init_process_group", self._init)
        self._patches.wrap_named(c10d, "_new_process_group_helper", self._new_group)
        wrap(c10d, "destroy_process_group", self._destroy)
        wrap(c10d, "get_backend", self._get_backend)
        self._patches.wrap_named(c10d, "split_group", self._split_group)
        for name in ("TCPStore", "FileStore", "HashStore"):
            self._patches.replace(dist, name, store_class(self.world_size, name))
        for name, found in list(vars(torch._C._distributed_c10d).items()):
            if name.startswith("ProcessGroup") and issubclass(
                found, torch._C._distributed_c10d.Backend
            ):
                self._patches.replace(torch._C._distributed_c10d, name, _backend_class(found))

    def _init(self, original: Any, given: dict[str, Any]) -> None:
        """Run ``init_process_group`` in this world, whatever the program asks for."""
        self._patch_imported()
        original(
            FAKE,
            store=self._store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=given.get("timeout"),
        )
        self._wanted_backends[c10d._get_default_group()] = _name_of(given.get("backend"))

    def _new_group(self, original: Any, given: dict[str, Any]) -> Any:
        """Make a group on the fake backend. Without a backend of its own, torch passes that of the
        default group, which is the fake one: then the program wants what it wanted there.
        """
        for name in ("device_id", "backend_options", "pg_options"):
            given.pop(name, None)
        default, backend = c10d._world.default_pg, given["backend"]
        wanted = (
            self._wanted_backends.get(default, "")
            if default is not None and _name_of(backend) == FAKE
            else _name_of(backend)
        )
        self._patch_imported()
        made = original(**{**given, "backend": FAKE})
        if isinstance(made[0], dist.ProcessGroup):
            self._wanted_backends[made[0]] = wanted
        return made

    def _destroy(self, original: Any, group: Any = None) -> None:
        if self.before_destroy is not None and (group is None or group is c10d._world.default_pg):
            self.before_destroy()
        original(group)

    def _get_backend(self, original: Any, group: Any = None) -> Any:
        """Return the backend that the program asked for, to the program and to torch's pipelining,
        which may choose by it. The rest of torch needs the true one.
        """
        found = original(group)
        wanted = self._wanted_backends.get(
            group if group is not None else c10d._get_default_group()
        )
        is_for_torch = called_by_torch() and not called_by_torch("torch.distributed.pipelining")
        return wanted if wanted and not is_for_torch else found

    def _split_group(self, original: Any, given: dict[str, Any]) -> Any:
        """Make an ordinary group of the same ranks, since the fake backend cannot split."""
        parent = dist.get_process_group_ranks(given.get("parent_pg") or c10d._get_default_group())
        for each in given.get("split_ranks") or []:
            ranks = [parent[rank] for rank in each]
            if self.rank in ranks:
                return dist.new_group(ranks, group_desc=given.get("group_desc"))
        return None

    # --- gaps of the backend

    def _fill_gaps(self) -> None:
        wrap = self._patches.wrap
        wrap(
            c10d,
            "monitored_barrier",
            lambda original, group=None, *args, **kwargs: dist.barrier(group),
        )
        wrap(c10d, "recv", self._recv)
        wrap(c10d, "_store_based_barrier", lambda original, *args, **kwargs: None)
        for kind in (dist.Work, *dist.Work.__subclasses__()):
            if "get_future" in kind.__dict__:
                wrap(kind, "get_future", self._futures.get_future)
        import torch.multiprocessing as multiprocessing
        import torch.multiprocessing.spawn as spawn

        wrap(spawn, "spawn", self._spawn)
        wrap(multiprocessing, "start_processes", self._spawn)
        # FSDP2 on a CPU calls them on 2.6.0's streams
        for name in ("record_event", "wait_event", "wait_stream", "synchronize"):
            if not hasattr(torch.cpu.Stream, name):
                self._patches.set(torch.cpu.Stream, name, lambda stream, *args: stream)
        if not hasattr(torch.cpu, "Event"):
            self._patches.set(torch.cpu, "Event", torch.cpu.Stream)
        # a program calls it on a backend that it makes by hand
        self._patches.set(
            torch._C._distributed_c10d.FakeProcessGroup,
            "_set_sequence_number_for_group",
            lambda backend: None,
        )
        self._patch_ddp()

    def _recv(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``dist.recv``; of one from any rank, return the rank before as the sender."""
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if "sourceRank" not in str(error):
                raise
            # The fake Work names no sender; the receive itself was issued.
            return (self.rank - 1) % self.world_size

    def _spawn(
        self, original: Any, fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any
    ) -> None:
        """Run ``mp.spawn`` as the one rank that this process plays: of all ranks, or of a node."""
        fn(self.rank if nprocs > self.local_world_size else self.local_rank, *args)

    def _patch_imported(self) -> None:
        """Patch parts of torch only if the program has imported them: the import takes a second."""
        if "torch.distributed.tensor" in sys.modules:
            shard_attention()
        fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
        if fully_shard is not None and fully_shard._chunk_with_empty is not _chunk:
            self._patches.set(fully_shard, "_chunk_with_empty", _chunk)
        if "torch.distributed.pipelining" in sys.modules and not self._pipelining_patched:
            self._pipelining_patched = True
            deliver_votes(self._patches, self.objects)

    def _patch_ddp(self) -> None:
        """Replace DDP's all-reduce, which asserts on the fake future, by torch's hook."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        hooked: weakref.WeakSet[Any] = weakref.WeakSet()

        def forward(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if module not in hooked:
                hooked.add(module)
                register(module, None, default_hooks.allreduce_hook)
            return original(module, *args, **kwargs)

        def register_comm_hook(original: Any, module: Any, state: object, hook: Any) -> None:
            hooked.add(module)
            original(module, state, hook)

        def register_built_in(original: Any, module: Any, comm_hook_type: Any) -> None:
            hooked.add(module)
            half = "FP16" in str(comm_hook_type)
            register(
                module,
                None,
                default_hooks.fp16_compress_hook if half else default_hooks.allreduce_hook,
            )

        register = DistributedDataParallel.register_comm_hook
        self._patches.wrap(DistributedDataParallel, "forward", forward)
        self._patches.wrap(DistributedDataParallel, "register_comm_hook", register_comm_hook)
        self._patches.wrap(
            DistributedDataParallel, "_register_builtin_comm_hook", register_built_in
        )


class _Futures(tap.Subscriber):
    """Gives the futures of recent works a value: their op's tensors, as on a real backend."""

    sees_fake_tensors = True

    def __init__(self) -> None:
        self._last: deque[tuple[Any, list[torch.Tensor]]] = deque(maxlen=8)
        self._lock = threading.Lock()

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Any:
        if spec.name == "barrier" or not spec.tensors:
            return None
        written = arguments[spec.writes[0]] if spec.writes else arguments[spec.tensors[0]]
        return written if isinstance(written, (list, tuple)) else [written]

    def returned(self, token: Any, result: Any) -> None:
        boxed = result[-1] if type(result) is tuple else result
        if token is not None and boxed is not None:
            with self._lock:
                self._last.append((tap.unbox_work(boxed), list(token)))

    def get_future(self, original: Any, work: Any) -> Any:
        """Return a future that has a value, in place of ``Work.get_future()``."""
        with self._lock:
            tensors = next(
                (tensors for other, tensors in reversed(self._last) if other is work), None
            )
        if tensors is None:
            return original(work)
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return future


def _backend_class(kind: type[Any]) -> type[Any]:
    """Return a stand-in for the class of a real backend, such as ``ProcessGroupGloo``, for programs
    that make a backend by hand: it makes the fake one.
    """
    from torch._C._distributed_c10d import FakeProcessGroup

    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)

    def __new__(cls: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        return make(rank, size)

    return type(kind.__name__, (kind,), {"__new__": __new__})


def is_spawned() -> bool:
    """Return whether the caller runs in a rank that the program started itself."""
    spawn = FakeWorld._spawn.__code__
    return any(each.f_code is spawn for each, _ in traceback.walk_stack(sys._getframe()))


def _name_of(backend: Any) -> str:
    """Return a backend's name as torch spells it; empty for none."""
    return str(backend).lower() if backend is not None else ""


def _chunk(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    """Chunk a parameter as FSDP2 does, but let the ranks without a part share one empty tensor. To
    make one for each takes much of the time of a large world.
    """
    chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
    if len(chunks) < num_chunks:
        chunks += [chunks[0].new_empty(0)] * (num_chunks - len(chunks))
    return chunks


# --- DTensor: its caches, which outlive the process groups that their entries name, and attention
# on the CPU, which stands for the GPU
#
# Tried on torch 2.6.0, 2.13.0 and 2.15.0.

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def shard_attention() -> None:
    """Teach DTensor to shard the CPU's attention as it shards that of CUDA: by batch or by heads,
    if at all.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    ways = (Replicate(), Shard(0), Shard(1))
    known: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    if _FORWARD in known:
        return

    def forward(
        query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **others: Any
    ) -> Any:
        mask = [Replicate()] if others.get("attn_mask") is not None else []
        return [([way] * 2, [way] * 3 + mask) for way in ways]

    def backward(*args: Any, **others: Any) -> Any:
        mask = [Replicate()] if others.get("attn_mask") is not None else []
        return [([way] * 3, [way] * 6 + mask) for way in ways]

    register_sharding(_FORWARD)(forward)
    register_sharding(_BACKWARD)(backward)


def clear_caches() -> None:
    """Empty every cache of ``torch.distributed``, on all threads.

    Their keys compare meshes by value. A mesh of an earlier world that looks like the present one
    therefore finds its entry: a plan with groups that no longer exist.
    """
    kind = functools._lru_cache_wrapper
    for found in gc.get_referrers(kind):  # its instances: some are per thread and have no name
        if type(found) is kind and str(getattr(found, "__module__", "")).startswith(
            "torch.distributed"
        ):
            found.cache_clear()
    redistribute: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    clear_plans = getattr(redistribute, "clear_redistribute_planner_cache", None)
    if clear_plans is not None:
        clear_plans()
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        with contextlib.suppress(RuntimeError):  # this thread has none
            clear_native()
