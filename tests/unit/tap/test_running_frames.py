"""The frames of a stack that runs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commlens import tap
from commlens.model.collective import Frame
from commlens.model.frames import FrameKind
from commlens.tap.running_frames import kind_of_file, user_frame, user_line


def test_the_innermost_line_of_the_program() -> None:
    lines = []

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = torch.nn.Sequential(Doubled())
    model.register_forward_hook(lambda *_: lines.append(user_line(sys._getframe())))
    model[0].register_forward_hook(lambda *_: lines.append(user_line(sys._getframe(1))))
    line = sys._getframe().f_lineno + 1
    model(torch.ones(1))
    # torch called the hook, and was called here
    assert lines[0] == f"test_running_frames.py:{line}"
    assert lines[1].startswith("test_running_frames.py:")


def test_a_file_name_that_is_no_text_is_escaped() -> None:
    found: dict[str, Any] = {"user_frame": user_frame, "sys": sys}
    exec(compile("frame = user_frame(sys._getframe())", "/home/caf\udce9.py", "exec"), found)
    assert found["frame"] == Frame("/home/caf\\udce9.py", 1, "<module>", FrameKind.USER)


def test_no_frame() -> None:
    assert user_line(None) == ""


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (__file__, FrameKind.USER),
        (tap.__file__, FrameKind.COMMLENS),
        (torch.__file__, FrameKind.TORCH),
        (pytest.__file__, FrameKind.LIBRARY),
        (json.__file__, FrameKind.PYTHON),
    ],
)
def test_the_kind_of_a_file(file: str, kind: FrameKind) -> None:
    assert kind_of_file(file) is kind
