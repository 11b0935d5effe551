"""The line of the user's program."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

import torch

from commlens.numbers.user_lines import user_line


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
    assert lines[0] == f"test_user_lines.py:{line}"
    assert lines[1].startswith("test_user_lines.py:")


def test_no_frame() -> None:
    assert user_line(None) == ""
