"""The library and parameters behind a collective: FSDP2's blocks, FSDP's units, DDP's buckets.

FSDP's own frames hold the block. DDP's reducer is C++: it launches its buckets in order, and each
takes the next parameters of an order that DDP's statistics report, as long as the sizes agree. If
the last two parameters of a model have 10 and 100 elements, its first all_reduce of 110 elements is
``Owner("DDP", "bucket 0", ("net2.bias", "net2.weight"))``.

The parameters of the traced modules and their sharding are read between steps: FSDP2 gathers a
block's parameters while it runs. For a model that only runs forward, or is freed before the trace
stops, they are read when its root's first call returns.
Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import weakref
from types import FrameType
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from commlens.model.trace import Owner, TracedParameter
from commlens.tracing.attribution.module_calls import ModuleCall, ModuleRow
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.stacks import StackInfo


class Parameters:
    """The parameters of a tracker's rows."""

    def __init__(self, rows: list[ModuleRow]) -> None:
        self._rows = rows
        self._known: dict[ModuleRow, tuple[TracedParameter, ...]] = {}
        self._read_rows = 0  # number of rows read so far

    def read(self, first: int = 0) -> None:
        """Record the current sharding for the rows from ``first`` on whose modules still exist."""
        meshes: dict[int, str] = {}
        for row in self._rows[first:]:
            module = row.ref()
            if module is not None:
                self._known[row] = tuple(_described(module, meshes))
        self._read_rows = len(self._rows)

    def left(self, call: ModuleCall) -> None:
        """Read the parameters of new rows when a root's call has returned."""
        if call.parent is None and self._read_rows < len(self._rows):
            self.read(self._read_rows)

    def of(self, row: ModuleRow) -> tuple[TracedParameter, ...]:
        """Return the parameters of a row."""
        return self._known.get(row, ())

    def of_path(self, path: str) -> tuple[TracedParameter, ...]:
        """Return the parameters of the first row with this path."""
        return next((self.of(row) for row in self._rows if row.path == path), ())


def _described(module: Module, meshes: dict[int, str]) -> list[TracedParameter]:
    found = []
    for name, tensor in module._parameters.items():
        if tensor is None:
            continue
        with contextlib.suppress(Exception):  # parameters of a lazy module have no shape yet
            found.append(_parameter(name, tensor, meshes))
    return found


def _parameter(name: str, tensor: Any, meshes: dict[int, str]) -> TracedParameter:
    shape = tuple(int(length) for length in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, DTensor):
        return TracedParameter(name, "", shape, dtype, tensor.numel() * tensor.element_size())
    mesh = tensor.device_mesh
    if id(mesh) not in meshes:
        meshes[id(mesh)] = str(mesh)
    local = tensor._local_tensor
    return TracedParameter(
        name,
        str(tensor.placements),
        shape,
        dtype,
        local.numel() * local.element_size(),
        meshes[id(mesh)],
    )


class Owners:
    """Finds and caches owners."""

    def __init__(self, modules: ModuleTracker) -> None:
        self._modules = modules
        self._blocks: dict[int, tuple[Any, Owner, str | None]] = {}  # by id of FSDP's object
        self._reducers: list[_Reducer] = []
        modules.on_enter.append(self._module_called)

    def _module_called(self, call: Any, module: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            reducer = next((r for r in self._reducers if r.ref() is module), None)
            if reducer is None:
                self._reducers = [r for r in self._reducers if r.ref() is not None]
                self._reducers.append(reducer := _Reducer(module, call.row))
            reducer.start()

    def find(
        self, info: StackInfo, frame: FrameType | None, op: str, tensor: tuple[int, str] | None
    ) -> tuple[Owner | None, str | None]:
        """Return the owner of a collective and the path of its module.

        ``tensor`` is the number of elements and dtype of its first tensor.
        """
        for kind, describe in (("FSDP2 block", _fsdp2_owner), ("FSDP unit", _fsdp1_owner)):
            if kind in info.markers:
                (block,) = info.values(kind, frame)
                return self._block(block, describe)
        if not self._reducers or op != "all_reduce":
            return None, None
        if "DDP bucket" in info.markers:
            (bucket,) = info.values("DDP bucket", frame)
            return self._hooked_bucket(bucket)
        if (info.engine_calls or frame is None) and tensor is not None:
            live = [reducer for reducer in self._reducers if reducer.ref() is not None]
            for reducer in sorted(live, key=lambda r: -r.started):
                owner = reducer.next_bucket(*tensor)
                if owner is not None:
                    return owner, reducer.row.path
        return None, None

    def hooked_call(self, info: StackInfo, frame: FrameType | None, call: ModuleCall) -> ModuleCall:
        """Return the call of the FSDP2 block whose backward starts. Its hook runs in the node of
        its output, often a child's node.
        """
        (state,) = info.values("FSDP2 state", frame)
        modules = getattr(state, "_modules", ())
        outer: ModuleCall | None = call
        while outer is not None:
            if outer.row.ref() in modules:
                return outer
            outer = outer.parent
        return call

    def _block(self, block: Any, describe: Any) -> tuple[Owner | None, str | None]:
        if block is None:
            return None, None
        known = self._blocks.get(id(block))
        if known is None or known[0]() is not block:
            modules, owner = describe(block)
            path = next((p for m in modules if (p := self._modules.paths.path_of(m))), None)
            known = (weakref.ref(block), owner, path)
            if owner.parameters:  # none means not initialised yet
                self._blocks[id(block)] = known
        _, owner, path = known
        return (Owner(owner.library, path, owner.parameters) if path else owner), path

    def _hooked_bucket(self, bucket: Any) -> tuple[Owner | None, str | None]:
        try:
            paths = [
                path for p in bucket.parameters() if (path := self._modules.paths.parameter_path(p))
            ]
            row = next(
                (r.row for r in self._reducers if paths and paths[0].startswith(r.row.path + ".")),
                None,
            )
            names = tuple(
                path.removeprefix(f"{row.path}.") if row is not None else path for path in paths
            )
            return Owner("DDP", f"bucket {bucket.index()}", names), (
                row.path if row is not None else None
            )
        except Exception:
            return None, None


def _fsdp2_owner(group: Any) -> tuple[Any, Owner]:
    parameters = tuple(
        str(p._param_fqn) for p in group.fsdp_params if getattr(p, "_param_fqn", None)
    )
    return getattr(group, "modules", ()), Owner(
        "FSDP2", str(getattr(group, "_module_fqn", None) or "root"), parameters
    )


def _fsdp1_owner(handle: Any) -> tuple[Any, Owner]:
    parameters = tuple(str(name) for name in getattr(handle.flat_param, "_fqns", ()))
    module = getattr(handle, "_fully_sharded_module", None)
    return (module,) if module is not None else (), Owner(
        "FSDP", parameters[0].rpartition(".")[0] if parameters else "unit", parameters
    )


class _Reducer:
    """The reducer of one DDP module, and how far it has come in this backward pass."""

    _count = 0  # forwards of all reducers

    def __init__(self, module: DistributedDataParallel, row: ModuleRow) -> None:
        self.ref = weakref.ref(module)
        self.row = row
        self.started = 0  # number of its last forward among all
        ignored: set[str] = getattr(module, "parameters_to_ignore", set())
        self.parameters = [
            (name, p.numel(), str(p.dtype).removeprefix("torch."))
            for name, p in module.module.named_parameters()
            if p.requires_grad and name not in ignored
        ]
        # possible orders of the parameters in its buckets; the first that fits the sizes is correct
        self.orders: list[list[int]] = []
        self.rebuilt: list[int] = []  # the order of the final buckets, once DDP reports it
        self.taken: dict[str, int] = {}  # by dtype: number of parameters reduced so far
        self.bucket = 0

    def start(self) -> None:
        """Start a forward: its backward launches the buckets from the first one."""
        _Reducer._count += 1
        self.started = _Reducer._count
        # now: from inside the reducer this would deadlock on its lock
        self.orders = self._possible_orders()
        self.taken = {}
        self.bucket = 0

    def next_bucket(self, numel: int, dtype: str) -> Owner | None:
        """Return the next bucket if it has this size; None if the collective is not the
        reducer's.
        """
        for order in self.orders:
            of_dtype = [i for i in order if self.parameters[i][2] == dtype]
            start = self.taken.get(dtype, 0)
            names, left = [], numel
            for i in of_dtype[start:]:
                if left <= 0:
                    break
                names.append(self.parameters[i][0])
                left -= self.parameters[i][1]
            if names and left == 0:
                self.orders = [order]
                self.taken[dtype] = start + len(names)
                self.bucket += 1
                return Owner("DDP", f"bucket {self.bucket - 1}", tuple(names))
        if dtype == "int32" and numel == len(self.parameters):
            return Owner("DDP", "map of used parameters")
        return None

    def _possible_orders(self) -> list[list[int]]:
        declared = list(range(len(self.parameters)))[::-1]
        module = self.ref()
        if module is None or (
            getattr(module, "find_unused_parameters", False)
            and not getattr(module, "static_graph", False)
        ):
            return [declared]  # such buckets are never rebuilt
        if self.rebuilt:
            return [self.rebuilt]
        orders = []
        try:
            statistics = module.logger._get_ddp_logging_data().strs_map
            for key in (
                "rebuilt_per_bucket_param_indices",
                "prev_iteration_grad_ready_order_indices",
            ):
                order = [
                    int(number) for number in statistics.get(key, "").replace(",", " ").split()
                ]
                if sorted(order, reverse=True) == declared:
                    orders.append(order)
                    if key.startswith("rebuilt"):
                        self.rebuilt = order
        except Exception:
            orders = []
        return [*orders, declared]
