"""Words about ranks that disagree or are out of step."""

from __future__ import annotations

import pytest

from commlens.diagnosis.words.mismatch import _thread_line
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    ProcessGroup,
    State,
)

_PACKAGES = "/venv/lib/python3.12/site-packages/torch/distributed"
_GATHER = Frame(f"{_PACKAGES}/checkpoint/utils.py", 135, "gather_object", FrameKind.TORCH)
_SAVE = Frame(f"{_PACKAGES}/checkpoint/state_dict_saver.py", 20, "save", FrameKind.TORCH)
_LOOP = Frame(f"{_PACKAGES}/elastic/agent.py", 7, "run", FrameKind.TORCH)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((), "an unknown line"),
        ((_LOOP,), "torch/distributed/elastic/agent.py:7 run"),
        (
            (_GATHER, _LOOP),
            "torch/distributed/checkpoint/utils.py:135 gather_object (a checkpoint)",
        ),
        (
            (_GATHER, _SAVE, _LOOP),
            "torch/distributed/checkpoint/state_dict_saver.py:20 save (a checkpoint)",
        ),
    ],
)
def test_a_line_of_torch_tells_the_purpose_of_its_thread(
    stack: tuple[Frame, ...], line: str
) -> None:
    channel = Channel(ProcessGroup("0", (0, 1)), "cpu")
    args = CollectiveArgs("gather", "gather")
    op = Collective(0, channel, 1, args, State.ISSUED, 1, stack=stack)
    assert _thread_line(op) == line
