"""Finds the tensors that a collective or a tensor op reads, and those that it writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch._ops import OpOverload

from commlens.model.ops import BARRIERS, wire_op
from commlens.tap import tap

_NO_ACCESS: Final = frozenset(
    {
        "_unsafe_view",
        "is_contiguous",
        "is_non_overlapping_and_dense",
        "is_pinned",
        "is_same_size",
        "is_strides_like_format",
        "numel",
        "record_stream",
        "resize_",
        "resize_as_",
        "set_",
        "size",
        "storage_offset",
        "stride",
    }
)
"""Ops that look at a tensor's form only, though their schemas do not say so."""
_NO_ACCESS_PREFIXES: Final = ("new_", "sym_", "_assert_tensor_metadata", "_has_")
_NAMESPACES: Final = frozenset({"aten", "prims"})


class Operand(NamedTuple):
    """A tensor that a call of a collective or of a tensor op reads or writes."""

    tensor: Any
    written: bool  # else it is only read


def operands_of(spec: tap.OpSpec, arguments: tuple[Any, ...], rank: int) -> list[Operand]:
    """Return the tensors of a call of a ``c10d`` op.

    Args:
        spec: of the op.
        arguments: of the call.
        rank: of this process in the group.
    """
    op = wire_op(spec.name)
    if op in BARRIERS:
        return []
    is_root = spec.root >= 0 and int(arguments[spec.root]) == rank
    # An op without output arguments works in place, but these ranks only give their tensor: the
    # sender, the root of a broadcast, and all but the root of a reduce.
    only_read = (
        spec.name == "send" or (op == "broadcast" and is_root) or (op == "reduce" and not is_root)
    )
    return [
        Operand(tensor, position in spec.writes if spec.writes else not only_read)
        for position in spec.tensors
        for tensor in tensors_in(arguments[position])
    ]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument: itself, or those of a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


class OpAccess:
    """A tensor op, with a function that runs it, and which tensors a call reads and writes, by the
    op's schema.
    """

    def __init__(self, op: Any) -> None:
        self.op = op  # kept alive, since it is looked up by its id
        # what an OpOverload calls in turn: without it, torch's frame would stand in every stack
        self.run = op._op if type(op) is OpOverload else op
        # by argument: its position, its name, whether it is written
        self.arguments = tuple(_accessed(op)) if type(op) is OpOverload else ()

    def accesses(self, args: Any, kwargs: Any) -> Iterator[Operand]:
        """Yield the tensors that a call reads or writes."""
        for position, name, written in self.arguments:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors_in(value):
                yield Operand(tensor, written)


def _accessed(op: Any) -> Iterator[tuple[int, str, bool]]:
    name = op._schema.name.partition("::")[2]
    if (
        op.namespace not in _NAMESPACES
        or name in _NO_ACCESS
        or name.startswith(_NO_ACCESS_PREFIXES)
        or name.endswith("_like")
        or torch.Tag.inplace_view in op.tags
    ):
        return
    for position, argument in enumerate(op._schema.arguments):
        alias = argument.alias_info
        is_view = alias is not None and not alias.is_write
        if "Tensor" in str(argument.type) and not is_view:
            yield position, argument.name, alias is not None
