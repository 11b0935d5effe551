"""Pipeline schedules in a fake world: stages vote on how to learn their shapes, and all others are taken to vote as this one.

The vote goes from stage to stage in 2.13.0 and through an all-reduce in 2.15.0; 2.6.0 has none. The shapes themselves are objects.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from commlens.tracing.patches import Patches
from commlens.tracing.preview.objects import Objects
from commlens.tracing.preview.tensors import really


def install(patches: Patches, objects: Objects) -> None:
    """Wrap what votes."""
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
    patches.wrap(PipelineStage, "_warmup_forward_vote", lambda original: really(forward(original)))
    patches.wrap(PipelineStage, "_warmup_backward_result", lambda original: really(backward(original)))
    for schedule in (schedules._PipelineSchedule, *_subclasses(schedules._PipelineSchedule)):
        patches.wrap(schedule, "_initialize_pipeline_distributed_state", really)


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = kind.__subclasses__()
    return found + [each for one in found for each in _subclasses(one)]
