"""The arguments of collectives, interned: most programs repeat a few.

``dist.all_reduce(x)`` of the same shape on the same group gets the same :class:`InternedArgs` each
time. So it is described once, and its blob in the black box is written once, or again when newer
ones are about to overwrite it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from commlens.blackbox import layout as L
from commlens.model.ops import GLOO_WAIT_ONLY, POINT_TO_POINT, wire_op
from commlens.tap import tap
from commlens.tap.groups import LiveChannel, LiveGroup
from commlens.tap.rejections import will_be_refused

_TABLE_MAX = 10_000  # then it begins anew: shapes that never repeat must not fill the memory
_Tensor = torch.Tensor
_strided = torch.strided


class InternedArgs:
    """What a collective is called with, its channel, and what follows from both.

    Whether the program passes ``async_op=True``, and whether the channel's host runs ahead of its
    device, decide how the end of the op is seen::

        async_op  host        meets  synchronous  is_held
        False     waits       yes    yes          no       the call returns when the op is done
        False     runs ahead  yes    no           no
        True      waits       no     no           yes      its Work is held and asked
        True      runs ahead  no     no           no
    """

    __slots__ = (
        "blob",
        "channel",
        "content",
        "fails_locally",
        "first_tensor",
        "flags",
        "is_held",
        "meets",
        "misaddressed",
        "next_number",
        "next_tagged",
        "no_such_peer",
        "op",
        "peer",
        "synchronous",
        "tag",
        "too_large",
        "wait_only",
    )

    def __init__(
        self,
        content: dict[str, Any],
        channel: LiveChannel,
        peer: int = -1,
        tag: int = 0,
        flags: int = 0,
    ) -> None:
        self.content = content
        self.channel = channel
        self.peer = peer  # global rank, -1 where there is none
        self.tag = tag
        self.flags = flags
        self.blob = 0
        self.too_large = False  # for a blob, so it is not encoded each time
        self.op: str = content["op"]
        tensors = content["in"] or content["out"]
        # number of elements and dtype
        self.first_tensor = (math.prod(tensors[0][0]), tensors[0][1]) if tensors else None
        self.next_number = (
            channel.pair(peer, self.op) if self.op in POINT_TO_POINT else channel.next_number
        )
        # Where messages meet by tag, those of each tag are counted, too.
        self.next_tagged = (
            channel.pair(peer, f"{self.op} {tag}")
            if self.op in POINT_TO_POINT and channel.matches_tags
            else None
        )
        # Strict verification lets the ranks of such a call meet before it is issued, even if the
        # host runs ahead. Torch 2.6 does not say: then it counts as asynchronous.
        self.meets = content["async"] is False
        self.synchronous = self.meets and not channel.runs_ahead
        self.is_held = not self.synchronous and not channel.runs_ahead
        self.wait_only = self.op in GLOO_WAIT_ONLY  # its Work does not tell whether it is done
        self.misaddressed = False  # its root, peer or tag cannot be
        # the backend will refuse it on this rank alone, or fail its wait: no peer's can match it
        self.fails_locally = False
        self.no_such_peer = False  # of a message: the group has no member with this rank


class CoalescedGroup:
    """A coalesced group under construction by one thread: one collective with its members."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.members: list[InternedArgs] = []
        self.sequence_number = 0

    def add(self, args: InternedArgs) -> int:
        """Add a member and return its sequence number: collectives share the group's,
        point-to-point ops keep that of their pair.
        """
        self.members.append(args)
        if args.op in POINT_TO_POINT:
            return args.next_number()
        self.sequence_number = self.sequence_number or args.next_number()
        return self.sequence_number


class ArgsTable:
    """The interned arguments of this process. No tensor is kept."""

    def __init__(self) -> None:
        self._table: dict[Any, InternedArgs] = {}

    def find(self, spec: tap.OpSpec, arguments: tuple[Any, ...], group: LiveGroup) -> InternedArgs:
        """Return the interned arguments of a call of an op on a group. The reduce op is not
        among them: the record of each call has its own.
        """
        asynchronous = (
            arguments[spec.asynchronous]
            if 0 <= spec.asynchronous < len(arguments)
            else spec.asynchronous_default
        )
        if spec.takes_one_list and len(arguments[0]) == 1:
            # By far the most common case: one dense tensor in a list.
            tensor = arguments[0][0]
            try:
                signature: Any = (
                    tensor.shape,
                    tensor.dtype,
                    tensor.get_device(),
                    tensor.is_contiguous() or tensor.stride(),
                )
            except RuntimeError:  # sparse tensors do not say whether they are contiguous
                signature = _signature(tensor)
        else:
            signature = tuple([_signature(arguments[i]) for i in spec.tensors])
        if spec.root >= 0:
            key: Any = (spec.name, group, signature, asynchronous, arguments[spec.root])
        elif spec.tag >= 0:
            key = (
                spec.name,
                group,
                signature,
                arguments[spec.peer] if spec.peer >= 0 else -1,
                arguments[spec.tag],
            )
        elif spec.splits[0] >= 0:
            key = (
                spec.name,
                group,
                signature,
                asynchronous,
                *(tuple(arguments[i]) for i in spec.splits),
            )
        else:
            key = (spec.name, group, signature, asynchronous)
        args = self._table.get(key)
        if args is None:
            args = describe(spec, arguments, group)
            if len(self._table) >= _TABLE_MAX:
                self._table = {}
            self._table[key] = args
        return args


def describe(spec: tap.OpSpec, arguments: tuple[Any, ...], group: LiveGroup) -> InternedArgs:
    """Describe the arguments of a call of an op on a group, as a blob holds them.

    A tensor is ``[shape, dtype, device type, layout, order of the dimensions in memory]``, the last
    None if it is the usual one: an all_reduce of a float32 vector on a GPU has
    ``"in": [[[1024], "float32", "cuda", "strided", None]]``.
    """
    asynchronous = _given(arguments, spec.asynchronous, spec.asynchronous_default)
    root, peer = _given(arguments, spec.root, None), _given(arguments, spec.peer, None)
    inputs: list[Any] = []
    outputs: list[Any] = []
    devices: list[str] = []
    for i in spec.tensors:
        _describe(arguments[i], outputs if i in spec.writes else inputs, devices)
    content = {
        "k": "asked",  # the kind of the blob
        "op": wire_op(spec.name),
        "dop": spec.name,
        "in": inputs,
        "out": outputs,
        "rop": None,  # in the record of each call
        "root": None if root is None else group.global_rank(int(root)),
        "is": list(_given(arguments, spec.splits[0], ())),
        "os": list(_given(arguments, spec.splits[1], ())),
        "async": asynchronous if isinstance(asynchronous, bool) else None,
    }
    args = InternedArgs(
        content,
        group.channel(devices[0] if devices else "cpu"),
        -1 if peer is None else group.global_rank(int(peer)),
        int(_given(arguments, spec.tag, 0)),
        L.FLAG_ANY_SOURCE if spec.name == "recv_any_source_" else 0,
    )
    args.no_such_peer = _is_outside(peer, group)
    args.misaddressed = args.tag < 0 or _is_outside(root, group) or args.no_such_peer
    args.fails_locally = args.misaddressed or (
        not args.channel.runs_ahead and will_be_refused(content, group.size)
    )
    return args


def _is_outside(rank: Any, group: LiveGroup) -> bool:
    """Return whether a group has no such rank, as rank 3 in a group of two; False without one."""
    return rank is not None and not 0 <= int(rank) < group.size


def _given(arguments: tuple[Any, ...], position: int, default: Any) -> Any:
    """Return an argument; the default if the op does not have it, or it was left out."""
    return arguments[position] if 0 <= position < len(arguments) else default


def describe_tensors(value: Any) -> tuple[list[Any], str]:
    """Describe a tensor or the tensors of a list, as a blob holds them; and return the first one's
    device type.
    """
    found: list[Any] = []
    devices: list[str] = []
    _describe(value, found, devices)
    return found, devices[0] if devices else "cpu"


def _signature(value: Any) -> Any:
    if isinstance(value, _Tensor):
        layout = value.layout
        if layout is _strided:
            return (
                value.shape,
                value.dtype,
                value.get_device(),
                value.is_contiguous() or value.stride(),
            )
        return (value.shape, value.dtype, value.get_device(), layout)
    return tuple([_signature(item) for item in value]) if value is not None else None


def _describe(value: Any, into: list[Any], devices: list[str]) -> None:
    if isinstance(value, _Tensor):
        order = None
        if value.layout is _strided and not value.is_contiguous():
            strides = value.stride()
            order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
            order = None if order == list(range(value.dim())) else order
        devices.append(value.device.type)
        dtype, layout = (str(each).removeprefix("torch.") for each in (value.dtype, value.layout))
        into.append([list(value.shape), dtype, value.device.type, layout, order])
    elif value is not None:
        for item in value:
            _describe(item, into, devices)


def output_pointers(spec: tap.OpSpec, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the addresses of the tensors in the first argument that an op writes (in place: its
    first tensors). By these, the wait of a functional collective is recognised.
    """
    where = spec.writes or spec.tensors
    if not where:
        return ()
    found: list[int] = []
    _collect_pointers(arguments[where[0]], found)
    return tuple(found)


def _collect_pointers(value: Any, into: list[int]) -> None:
    if isinstance(value, _Tensor):
        if value.layout is _strided and value.numel():
            into.append(value.data_ptr())
    elif value is not None:
        for item in value:
            _collect_pointers(item, into)


def reduce_op_code(reduce_op: Any) -> int | None:
    """Return the value of a ReduceOp, boxed or not; None if torch cannot read it (boxed, 2.6 to
    2.9).
    """
    op = getattr(reduce_op, "op", None)
    if op is None:
        return None
    try:
        return int(op() if callable(op) else op)
    except Exception:
        return None


def reduce_op_name(reduce_op: Any) -> str | None:
    """Return the name of a ReduceOp, such as "SUM"; None if there is none or it cannot be read."""
    code = reduce_op_code(reduce_op)
    return L.reduce_op_of(code + 1) if code is not None else None
