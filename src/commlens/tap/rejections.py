"""Collectives that the backend refuses on one rank because of their arguments: they are never
issued, and no peer's can match them.

Tried on gloo, torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from commlens.matching.error_texts import may_be_peer_error
from commlens.model.ops import splits_fit


def was_not_issued(op: str, error: BaseException) -> bool:
    """Return whether a backend's error is about the call's arguments: then nothing was sent, and no
    rank will match the call.

    This is not known of a call that waits inside (monitored_barrier), or of an error that mentions
    the peers.

    Args:
        op: the wire op.
        error: the exception from the backend's call.
    """
    if (
        op == "monitored_barrier"
        or not isinstance(error, Exception)
        or isinstance(error, dist.DistError)
    ):
        return False
    return not may_be_peer_error(str(error))


def will_be_refused(content: dict[str, Any], size: int, backend: str = "gloo") -> bool:
    """Return whether a backend will refuse an op because its own tensors do not fit each other.

    Args:
        content: the arguments, as in a blob.
        size: the number of ranks in the group.
        backend: "gloo" or "nccl", which takes lists of tensors of different sizes.
    """
    name: str = content["dop"]
    inputs: list[Any] = content["in"]
    outputs: list[Any] = content["out"]
    if backend == "nccl" and name in ("allgather_", "reduce_scatter_"):
        return name == "allgather_" and len(outputs) != size
    if name == "reduce_scatter_":
        return len(inputs) != size
    if name == "alltoall_base_" and (content["is"] or content["os"]):
        pairs = ((inputs[0], content["is"]), (outputs[0], content["os"]))
        return not all(splits_fit([*tensor[0], 0][0], splits, size) for tensor, splits in pairs)
    if name in _FACTORS:
        input_factor, output_factor = _FACTORS[name](size)
        given = math.prod(inputs[0][0]) * input_factor
        return bool(given != math.prod(outputs[0][0]) * output_factor)
    # the root alone has the inputs of a scatter, and the outputs of a gather
    if name in _LISTS and inputs and (outputs or name == "allgather_"):
        listed, one = (inputs, outputs) if name == "scatter_" else (outputs, inputs)
        return _forms(listed) != _forms(one[:1]) * size
    return False


def _forms(tensors: list[Any]) -> list[Any]:
    """Return the shapes and dtypes."""
    return [tensor[:2] for tensor in tensors]


_FACTORS: Final[dict[str, Callable[[int], tuple[int, int]]]] = {
    "alltoall_base_": lambda size: (1, 1),
    "_allgather_base_": lambda size: (size, 1),
    "_reduce_scatter_base_": lambda size: (1, size),
}
"""Of the ops that take one tensor for all ranks, by the number of ranks: what the numbers of
elements of the input and of the output are multiplied with to be equal.
"""
_LISTS: Final = frozenset({"allgather_", "gather_", "scatter_"})
"""The ops that take a list with a tensor of one form for each rank."""
