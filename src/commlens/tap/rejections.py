"""What a backend refuses by itself, on the one rank that args for it: such an op is never issued, and meets no other rank's.

Tried on gloo, torch 2.6.0 and 2.13.0.
"""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from commlens.matching.error_texts import may_be_peer_error


def was_not_issued(op: str, error: BaseException) -> bool:
    """Whether an error of the backend's call is about its arguments: then nothing was sent, and no rank will meet it.

    Of a call that waits inside (monitored_barrier), or that speaks of its peers, that is not known.

    Args:
        op: the wire op.
        error: what the backend's call raised.
    """
    if op == "monitored_barrier" or not isinstance(error, Exception) or isinstance(error, dist.DistError):
        return False
    return not may_be_peer_error(str(error))


def will_be_refused(content: dict[str, Any], size: int) -> bool:
    """Whether an op's own tensors do not fit each other, which gloo says at once.

    Args:
        content: what was args, as in a blob.
        size: ranks of the group.
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
    if name == "_allgather_base_":
        return bool(math.prod(outputs[0][0]) != math.prod(inputs[0][0]) * size)
    if name == "_reduce_scatter_base_":
        return bool(math.prod(inputs[0][0]) != math.prod(outputs[0][0]) * size)
    return False
