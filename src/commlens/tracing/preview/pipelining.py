"""Pipeline schedules in a fake world. Stages vote on how to learn their shapes; the other stages
are assumed to vote as this one does.

The vote passes from stage to stage in 2.13.0 and through an all-reduce in 2.15.0; 2.6.0 has no
vote. The shapes are sent as objects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from commlens.tracing.patches import Patches
from commlens.tracing.preview.objects import Objects
from commlens.tracing.preview.tensors import run_on_real_tensors


def install(patches: Patches, objects: Objects) -> None:
    """Wrap the functions that vote."""
    from torch.distributed.pipelining import PipelineStage, schedules

    votes: dict[int, int] = {}

    def forward_vote(
        original: Any, stage: Any, has_backward: bool, received_acc: Any = None
    ) -> Any:
        with unset_fake_temporarily(), objects.delivering(torch.ones(1, dtype=torch.int32)):
            own = original(stage, has_backward, received_acc)
            votes[id(stage)] = int(own.item())
        return own

    def backward_result(original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            unset_fake_temporarily(),
            objects.delivering(torch.tensor([votes.pop(id(stage), 0)], dtype=torch.int32)),
        ):
            return original(stage, *args, **kwargs)

    patches.wrap(PipelineStage, "_warmup_forward_vote", forward_vote)
    patches.wrap(PipelineStage, "_warmup_backward_result", backward_result)
    for schedule in (schedules._PipelineSchedule, *_subclasses(schedules._PipelineSchedule)):
        patches.wrap(schedule, "_initialize_pipeline_distributed_state", run_on_real_tensors)


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = kind.__subclasses__()
    return found + [each for one in found for each in _subclasses(one)]
