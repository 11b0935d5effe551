"""Pipeline schedules in a fake world. Stages vote on how to learn their shapes; the other stages are assumed to vote as this one does.

The vote passes from stage to stage in 2.13.0 and through an all-reduce in 2.15.0; 2.6.0 has no vote. The shapes are sent as objects.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from commlens.tracing.patches import Patches
from commlens.tracing.preview.objects import Objects
from commlens.tracing.preview.tensors import on_real_tensors


def install(patches: Patches, objects: Objects) -> None:
    """Wrap the functions that vote."""
    from torch.distributed.pipelining import PipelineStage, schedules

    def forward(original: Any) -> Any:
        @functools.wraps(original)
        def _warmup_forward_vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
            with objects.delivering(torch.ones(1, dtype=torch.int32)):
                own = original(stage, has_backward, received_acc)
            votes[id(stage)] = int(own.item())
            return own

        return _warmup_forward_vote

    def backward(original: Any) -> Any:
        @functools.wraps(original)
        def _warmup_backward_result(stage: Any, *args: Any, **kwargs: Any) -> Any:
            with objects.delivering(torch.tensor([votes.pop(id(stage), 0)], dtype=torch.int32)):
                return original(stage, *args, **kwargs)

        return _warmup_backward_result

    votes: dict[int, int] = {}
    patches.wrap(PipelineStage, "_warmup_forward_vote", lambda original: on_real_tensors(forward(original)))
    patches.wrap(PipelineStage, "_warmup_backward_result", lambda original: on_real_tensors(backward(original)))
    for schedule in (schedules._PipelineSchedule, *_subclasses(schedules._PipelineSchedule)):
        patches.wrap(schedule, "_initialize_pipeline_distributed_state", on_real_tensors)


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = kind.__subclasses__()
    return found + [each for one in found for each in _subclasses(one)]
