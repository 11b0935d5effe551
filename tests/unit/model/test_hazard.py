"""Which call of torch.distributed a latent fault is about."""

from __future__ import annotations

from commlens.model.collective import Frame, FrameKind
from commlens.model.hazard import Hazard, Touch

C10D = Frame("/site/torch/distributed/distributed_c10d.py", 3000, "all_reduce", FrameKind.LIBRARY)
USER = Frame("/home/me/train.py", 12, "step", FrameKind.USER)


def test_calls_of_torch_itself_have_no_line() -> None:
    """FSDP and the reducer wait in C++, or for a stream."""
    fsdp = Frame("/site/torch/distributed/fsdp/_collectives.py", 7, "gather", FrameKind.LIBRARY)
    reducer = Frame("/site/torch/autograd/graph.py", 8, "_engine_run_backward", FrameKind.LIBRARY)
    assert Hazard("never-waited", 1, (C10D, fsdp, USER)).source is None
    assert Hazard("never-waited", 1, (reducer, USER)).source is None
    assert Hazard("never-waited", 1, (C10D, USER)).source == USER
    of_a_mode = Frame("/lib/torch/_ops.py", 1095, "__call__", FrameKind.TORCH)
    assert Hazard("never-waited", 1, (of_a_mode, C10D, USER)).source == USER
    assert Hazard("never-waited", 1, (of_a_mode, fsdp, USER)).source is None


def test_a_touch_has_the_innermost_line_of_the_program() -> None:
    functional = Frame(
        "/site/torch/distributed/_functional_collectives.py", 7, "all_gather", FrameKind.TORCH
    )
    optimizer = Frame("/site/torch/optim/sgd.py", 9, "step", FrameKind.TORCH)
    later = Frame("/home/me/train.py", 30, "step", FrameKind.USER)
    touch = Touch("aten.add_.Tensor", "written", "input", "float32[4]", (optimizer, later))
    hazard = Hazard("touched-in-flight", 1, (functional, USER), touch=touch)
    assert (hazard.op, hazard.source) == ("all_gather", USER)
    assert hazard.lines == ("touched-in-flight", USER, later)
