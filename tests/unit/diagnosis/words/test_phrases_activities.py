"""What ranks do, in words: one wording for each state and sign, with the number of the verb."""

from __future__ import annotations

from typing import get_args

import pytest

from commlens.diagnosis.index.activity import Activity, FrameClass, Sign, SignKind, State
from commlens.diagnosis.words.phrases import activity_words, sign_words
from commlens.model.collective import Frame, FrameKind

LINE = Frame("/home/me/train.py", 57, "load_batch", FrameKind.USER)
COMPILES = FrameClass("compilation", LINE)


@pytest.mark.parametrize(
    ("doing", "one", "several"),
    [
        pytest.param(
            Activity("data-loading", False, "runs", LINE, for_ns=31_000_000_000),
            "has been in train.py:57 load_batch for 31 s",
            "have been in train.py:57 load_batch for 31 s",
            id="line and time",
        ),
        pytest.param(
            Activity("unknown", False, "runs"),
            "is outside any collective",
            "are outside any collective",
            id="no line",
        ),
        pytest.param(
            Activity("memory-pressure", False, "runs", LINE, stack=COMPILES),
            "is compiling in train.py:57 load_batch",
            "are compiling in train.py:57 load_batch",
            id="its stack tells more than the reason",
        ),
        pytest.param(
            Activity("holding-gil", False, "holds-gil", LINE),
            "holds the GIL in train.py:57 load_batch",
            "hold the GIL in train.py:57 load_batch",
            id="GIL",
        ),
        pytest.param(
            Activity("user-code", False, "was-ended"),
            "was elsewhere",
            "were elsewhere",
            id="was ended",
        ),
    ],
)
def test_what_ranks_do(doing: Activity, one: str, several: str) -> None:
    assert activity_words(doing) == one
    assert activity_words(doing, [1, 2]) == several


def test_every_state_and_every_sign_has_words() -> None:
    states = [activity_words(Activity("unknown", False, state)) for state in get_args(State)]
    assert all(states) and len(set(states)) == len(states)
    signs = sign_words([Sign(kind, about=kind, frame=LINE) for kind in get_args(SignKind)])
    assert all(signs) and len(set(signs)) == len(signs)
