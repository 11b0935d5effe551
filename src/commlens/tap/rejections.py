"""Collectives that the backend refuses on one rank because of their arguments: they are never
issued, and no peer's can match them.

Tried on gloo, torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import math
from typing import Any

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


def will_be_refused(content: dict[str, Any], size: int) -> bool:
    """Return whether gloo will refuse an op because its own tensors do not fit each other.

    Args:
        content: the arguments, as in a blob.
        size: the number of ranks in the group.
    """
    name: str = content["dop"]
    inputs: list[Any] = content["in"]
    outputs: list[Any] = content["out"]
    if name == "allgather_" and inputs:
        return [tensor[:2] for tensor in outputs] != [inputs[0][:2]] * size
    if name == "scatter_" and inputs:
        return [tensor[:2] for tensor in inputs] != [outputs[0][:2]] * size
    if name == "gather_" and outputs:
        return [tensor[:2] for tensor in outputs] != [inputs[0][:2]] * size
    if name == "reduce_scatter_":
        return len(inputs) != size
    if name == "alltoall_base_":
        if not content["is"] and not content["os"]:
            return bool(math.prod(inputs[0][0]) != math.prod(outputs[0][0]))
        pairs = ((inputs[0][0], content["is"]), (outputs[0][0], content["os"]))
        return not all(
            splits_fit(shape[0] if shape else 0, splits, size) for shape, splits in pairs
        )
    if name == "_allgather_base_":
        return bool(math.prod(outputs[0][0]) != math.prod(inputs[0][0]) * size)
    if name == "_reduce_scatter_base_":
        return bool(math.prod(inputs[0][0]) != math.prod(outputs[0][0]) * size)
    return False
