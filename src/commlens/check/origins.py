"""The origins of tensors' values: whether the rank computes them alone, or other ranks send them.

In a fake world nothing arrives. So a tensor that a collective wrote, and every result computed from
it, has values that no real run would have. In a world of ranks 0 and 1, the origins are::

    x = torch.rand(3)      # None: the rank computes it alone
    dist.all_reduce(x)     # ValueOrigin(alike={(0, 1)}): unknown, but the same on both ranks
    y = x * 2              # the same origin
    z = x + torch.rand(3)  # ValueOrigin(): unknown, and perhaps different

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from commlens.tap import tap
from commlens.tap.groups import Groups
from commlens.tracing.in_flight.memory import storage_of
from commlens.tracing.in_flight.operands import tensors_in
from commlens.tracing.leave_to_eager import EagerMode
from commlens.tracing.preview.tensors import READS

Ranks = tuple[int, ...]


class ValueOrigin(NamedTuple):
    """The origin of a value that went through collectives. A value that the rank computes alone
    has no origin: None.
    """

    alike: frozenset[Ranks] = frozenset()
    """The groups in which the collectives gave every member the same value."""
    known: bool = False
    """This rank knows the value nevertheless: it sent it, or computed it from what it sent."""
    received: bool = False
    """Only some ranks received the value; the others know it, or do not need it."""
    undelivered: bool = False
    """Other ranks have not been seen to send it yet (``exchange.py``)."""


UNKNOWN = ValueOrigin()

_SAME_FOR_ALL = (
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "_allgather_base_",
)
_RECEIVED_BY_SOME = ("recv_", "recv_any_source_", "scatter_")
_FIRST_PURGE = 500
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_OVERWRITES = ("aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::random_")
_SHAPED_BY_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
    "aten::bincount",
}


def joined(origins: Sequence[ValueOrigin | None]) -> ValueOrigin | None:
    """Return the origin of a result that is computed from values of these origins.

    It is the same on the ranks of a group only if all values are, and a value that the rank
    computes alone (None) may differ on any other rank. A rank that knows all values knows the
    result: if it is not the same in any group, the rank computes it alone.
    """
    sent = [origin for origin in origins if origin is not None]
    alike = frozenset[Ranks]()
    if sent and len(sent) == len(origins):
        alike = frozenset.intersection(*(origin.alike for origin in sent))
    if all(origin.known for origin in sent):
        return ValueOrigin(alike, known=True) if alike else None
    return ValueOrigin(
        alike,
        received=any(origin.received for origin in sent),
        undelivered=any(origin.undelivered for origin in sent),
    )


def alike_in(origin: ValueOrigin, world_size: int) -> bool:
    """Check whether a value of this origin is the same on all ranks: whether its groups have every
    rank, or are dimensions of a mesh that span the world together.

    This rank knows only its own groups, one of each dimension. Two dimensions meet in this rank
    alone, two flattened pairs of dimensions (tp_cp and dp_cp) in the one that they share.
    """
    groups = [set(ranks) for ranks in origin.alike]
    widest = [group for group in groups if not any(group < other for other in groups)]
    reached, spanned = set[int](), 1
    for group in widest:
        shared = max(1, len(reached & group))
        reached |= group
        # groups of which one has a part of another's ranks are no dimensions
        spanned *= 0 if len(group) % shared else len(group) // shared
    return bool(widest) and world_size in (len(reached), spanned)


class Origins(EagerMode, tap.Subscriber):
    """Follows the values of tensors through all ops, while entered.

    Values of fake tensors are never known, unless torch keeps them as constants.
    """

    is_left_to_eager = True  # nothing is compiled in a fake world
    sees_fake_tensors = True

    def __init__(
        self, on_read: Callable[[ValueOrigin | None], None], on_shape: Callable[[ValueOrigin], None]
    ) -> None:
        """Call ``on_read`` where the program reads a value, and ``on_shape`` where an unknown value
        decides the shape of a tensor.
        """
        super().__init__()
        self._on_read = on_read
        self._on_shape = on_shape
        # By address of a storage, which no other one gets as long as we refer to it. But the
        # reference also keeps the header of a dead storage allocated, and malloc cannot join the
        # free memory on both sides of it: many dead ones cost gigabytes, so mark() drops them.
        self._origins: dict[int, tuple[StorageWeakRef, ValueOrigin]] = {}
        self._purge_at = _FIRST_PURGE
        self.groups = Groups()
        """Of the program: a destroyed one can still be used."""
        self.calls = 0
        """Collectives and messages issued so far."""
        self._calls_in: Counter[Ranks] = Counter()

    def __enter__(self) -> Origins:
        tap.attach(self)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        tap.detach(self)

    def of(self, tensor: Any) -> ValueOrigin | None:
        """Return the origin of a tensor's values; None if the rank computes them alone."""
        storage = storage_of(tensor)
        found = None if storage is None else self._origins.get(storage._cdata)
        if found is not None:
            return found[1]
        fake = isinstance(tensor, FakeTensor) and tensor.constant is None
        return UNKNOWN if fake else None

    def mark(self, tensor: Any, origin: ValueOrigin | None) -> None:
        """Set the origin of a tensor's values; None if the rank computes them alone."""
        storage = storage_of(tensor)
        if storage is None:
            return
        if origin is None:
            self._origins.pop(storage._cdata, None)
            return
        self._origins[storage._cdata] = StorageWeakRef(storage), origin
        if len(self._origins) > self._purge_at:
            self._origins = {
                address: found for address, found in self._origins.items() if not found[0].expired()
            }
            self._purge_at = 2 * len(self._origins) + _FIRST_PURGE

    def calls_in(self, groups: Iterable[Ranks]) -> int:
        """Count the calls that were issued so far in groups."""
        return sum(self._calls_in[ranks] for ranks in groups)

    # --- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and give its results the origin of its arguments."""
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        if any(each not in _PLAIN for each in types):
            return NotImplemented  # such as DTensor: its own ops come here next
        given = [*tensors_in(args), *tensors_in([*(kwargs or {}).values()])]
        copies = func._schema.name == "aten::copy_" and _is_whole(given[0])
        origin = joined([self.of(each) for each in (given[1:] if copies else given)])
        result = func._op(*args, **(kwargs or {}))  # without a frame of torch's in stacks
        if func.namespace in ("c10d", *_FUNCTIONAL):
            self._keep_groups_of_input(func, origin, result)
        elif func in READS:
            self._on_read(origin)
        else:
            self._computed(func, args, origin, [] if copies else given, result)
        return result

    def _computed(
        self,
        func: Any,
        args: Any,
        origin: ValueOrigin | None,
        given: list[torch.Tensor],
        result: Any,
    ) -> None:
        """Note the origin of the results that an op computed from these arguments."""
        if origin is not None and not origin.known and _shaped_by_values(func, args):
            self._on_shape(origin)
        if func._schema.name in _OVERWRITES and _is_whole(given[0]):
            origin = None
        written = [args[i] for i in _written(func) if i < len(args)]
        self._give(origin, given, (result, written))

    def _give(self, origin: ValueOrigin | None, given: list[torch.Tensor], result: Any) -> None:
        """Set the origin of an op's results. A result that shares its storage with an argument
        keeps the argument's origin, too: it is a view, or only a part of it was written.
        """
        if origin is None:
            for tensor in tensors_in(result):
                self.mark(tensor, None)
            return
        before = {storage._cdata for tensor in given if (storage := storage_of(tensor)) is not None}
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata in before & self._origins.keys():
                self.mark(tensor, joined([self._origins[storage._cdata][1], origin]) or UNKNOWN)
            else:
                self.mark(tensor, origin)

    def _keep_groups_of_input(self, func: Any, origin: ValueOrigin | None, result: Any) -> None:
        """Add the groups in which the input of the functional all_reduce was alike to its result.
        C++ reduces a copy, made below this mode: the tap sees it reduced, but not what it is of.
        """
        if origin is not None and func._schema.name.endswith("::all_reduce"):
            for tensor in tensors_in(result):
                own = self.of(tensor) or UNKNOWN
                self.mark(tensor, ValueOrigin(own.alike | origin.alike))

    # --- collectives, called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Any:
        """Return the call, which :meth:`returned` needs."""
        group = tap.unbox_group(arguments[spec.process_group])
        ranks = tuple(self.groups.find(group).ranks)
        self.calls += 1
        self._calls_in[ranks] += 1
        return spec, arguments, ranks, group.rank()

    def returned(self, token: Any, result: Any) -> None:
        """Give the tensors that the collective wrote their origin."""
        spec, arguments, ranks, rank = token
        if spec.name in ("send", "barrier", "monitored_barrier_") or len(ranks) == 1:
            return
        root = arguments[spec.root] if spec.root >= 0 else rank
        if root != rank and spec.name in ("reduce_", "gather_"):
            return
        reads = [i for i in spec.tensors if i not in spec.writes] if spec.writes else spec.tensors
        inputs = joined([self.of(each) for each in tensors_in([arguments[i] for i in reads])])
        origin = _result_of(spec.name, ranks, inputs, is_root=root == rank)
        for tensor in tensors_in([arguments[i] for i in spec.writes or spec.tensors]):
            self.mark(tensor, origin)

    def raised(self, token: Any, error: BaseException) -> None:
        """Leave the tensors alone."""


def _result_of(op: str, ranks: Ranks, inputs: ValueOrigin | None, *, is_root: bool) -> ValueOrigin:
    """Return the origin of the values that a rank receives from a collective of c10d."""
    before = inputs.alike if inputs is not None else frozenset()
    if op == "broadcast_":
        return ValueOrigin(frozenset({ranks}), is_root and (inputs is None or inputs.known))
    if op in _SAME_FOR_ALL:
        return ValueOrigin(before | {ranks})
    if op.startswith(("reduce_scatter", "_reduce_scatter")):
        return ValueOrigin(before - {ranks})
    return ValueOrigin(received=op in _RECEIVED_BY_SOME)


def _is_whole(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())


@functools.cache
def _written(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an op writes: not all of them are results."""
    return tuple(
        position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _shaped_by_values(func: Any, args: Any) -> bool:
    name: str = func._schema.name
    if name in _SHAPED_BY_VALUES:
        return True
    return name == "aten::index" and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])
    )
