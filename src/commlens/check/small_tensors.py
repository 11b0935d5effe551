"""Small tensors that ranks give to a collective, as data, and what the collective makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from commlens.tracing.preview.objects import Message

TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
"""Fractions are left out: their sums depend on the order of the ranks."""


class Given(NamedTuple):
    """What one rank gives."""

    op: str  # of c10d
    how: tuple[Any, ...]  # what else ranks must agree on, such as the reduce op
    known: bool  # whether the rank decides the values alone, or knows all that they come from
    splits: tuple[int, ...]  # rows for each rank; empty: the same number for each
    tensor: torch.Tensor

    def pack(self) -> Message:
        """Return this as bytes."""
        tensor = self.tensor.detach().contiguous()
        about = (*self[:-1], tuple(tensor.shape), tensor.dtype)
        return [pickle.dumps(about), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]


def unpack(message: Message) -> Given:
    """Return what :meth:`Given.pack` packed."""
    op, how, known, splits, shape, dtype = pickle.loads(message[0])
    tensor = torch.empty(shape, dtype=dtype)
    if message[1]:
        tensor = torch.frombuffer(bytearray(message[1]), dtype=dtype).reshape(shape)
    return Given(op, how, known, splits, tensor)


def result(given: Sequence[Given], place: int, outputs: Sequence[torch.Tensor]) -> bool:
    """Write what a collective gives the rank at ``place`` of the group into its outputs, and return
    True; do nothing and return False if the ranks' tensors do not fit together.
    """
    first = given[0]
    if any(
        (each.op, each.how, each.tensor.dtype) != (first.op, first.how, first.tensor.dtype)
        for each in given
    ):
        return False
    contents = _contents(given, place)
    if len(outputs) == 1 and len(contents) > 1:
        contents = [torch.cat([each.reshape(-1) for each in contents])]
    if [(each.numel(), each.dtype) for each in contents] != [
        (each.numel(), each.dtype) for each in outputs
    ]:
        return False
    for output, content in zip(outputs, contents, strict=True):
        output.copy_(content.view(output.shape))
    return True


def _contents(given: Sequence[Given], place: int) -> list[torch.Tensor]:
    """Return the tensors that a rank gets, from each of the others or of all together."""
    tensors = [each.tensor for each in given]
    if given[0].op == "allreduce_":
        return _reduced(tensors, given[0].how[0])
    if given[0].op != "alltoall_base_":
        return tensors
    parts = [_parts(each, len(given)) for each in given]
    return [] if None in parts else [each[place] for each in parts if each is not None]


def _parts(given: Given, ranks: int) -> Sequence[torch.Tensor] | None:
    """Return what a rank gives each of the others; None if its splits do not fit its tensor."""
    rows = given.tensor.shape[0] if given.tensor.dim() else 0
    splits = given.splits or (rows // ranks,) * ranks
    return given.tensor.split(splits) if sum(splits) == rows and len(splits) == ranks else None


def _reduced(tensors: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
    """Return the tensors reduced to one; none if they or the reduce op do not allow it."""
    if len({each.shape for each in tensors}) > 1:
        return []
    stacked, dtype = torch.stack(tensors), tensors[0].dtype
    if name in ("MAX", "MIN"):
        return [stacked.amax(0) if name == "MAX" else stacked.amin(0)]
    if dtype is torch.bool:
        return []
    if name in ("SUM", "PRODUCT"):
        return [stacked.sum(0, dtype=dtype) if name == "SUM" else stacked.prod(0, dtype=dtype)]
    return []
