"""The kinds of the files on a stack that was read from outside."""

from __future__ import annotations

import os

import pytest

from commlens.blackbox.job_dirs import start_ticks
from commlens.model.collective import Frame
from commlens.model.frames import FrameKind
from commlens.model.ranklog import ThreadStack
from commlens.outside.look import _sample, classifier
from commlens.processes.observer import Observer
from commlens.processes.pyspy import SeenFrame, SeenThread, Stacks
from commlens.processes.ranks import RankProcess


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/home/me/train.py", FrameKind.USER),
        ("/usr/lib/commlens/scenarios/programs/subgroups.py", FrameKind.USER),
        ("/usr/lib/commlens/scenarios/__main__.py", FrameKind.COMMLENS),
        ("/usr/lib/commlens/tap/tap.py", FrameKind.COMMLENS),
        ("/usr/lib/libtorch_cpu.so", FrameKind.NATIVE),
    ],
)
def test_a_file_on_a_stack_has_a_kind(file: str, kind: FrameKind) -> None:
    assert classifier(os.getpid())(file) is kind


def thread(number: int, *frames: Frame) -> SeenThread:
    stack = ThreadStack(number, str(number), frames, number, number == 1)
    return SeenThread(stack, [SeenFrame(frame, {}, {}) for frame in frames], False)


def test_a_rank_stands_where_the_thread_does_for_which_its_main_thread_waits() -> None:
    python = FrameKind.PYTHON
    main = thread(
        1,
        Frame("/lib/python3.11/concurrent/futures/_base.py", 451, "Future.result", python),
        Frame("/me/train.py", 13, "main"),
    )
    trains = thread(
        2,
        Frame("/site/torch/distributed/distributed_c10d.py", 9, "all_reduce", FrameKind.TORCH),
        Frame("/me/train.py", 8, "train"),
    )
    ticks = start_ticks(os.getpid())
    observer = Observer(use_py_spy=False)
    observer.add(os.getpid(), ticks)
    looks = [Stacks([main, trains], None) for _ in range(3)]
    sample = _sample(RankProcess(0, os.getpid(), ticks, 2), looks, observer, native=False)
    assert sample.call is not None
    assert sample.call.op == "all_reduce"
    assert sample.line == Frame("/me/train.py", 8, "train")
    assert sample.log.observation.stack_moved is False
