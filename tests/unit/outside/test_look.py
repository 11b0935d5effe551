"""The kinds of the files on a stack that was read from outside."""

from __future__ import annotations

import os

import pytest

from commlens.model.frames import FrameKind
from commlens.outside.look import classifier


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
