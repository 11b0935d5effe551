"""Sentences about a job as a whole."""

from __future__ import annotations

import pytest

from commlens.diagnosis.words.whole_job import past_torch
from commlens.model.bypass import Bypass


@pytest.mark.parametrize(
    ("bypass", "words"),
    [
        (
            Bypass("deep_ep", (2,), True, "calls", (1204, 1204)),
            "Rank 2 loaded deep_ep: 1,204 calls are recorded.",
        ),
        (Bypass("ray", (0,), False, "calls", (1, 1)), "Rank 0 called ray: 1 call is recorded."),
        (
            Bypass("deep_ep", (0, 1), True, "calls", (3, 1204)),
            "Ranks 0-1 loaded deep_ep: 3 to 1,204 calls of each are recorded.",
        ),
        (
            Bypass("cupy", (0, 1), True, "by-plugin"),
            "Ranks 0-1 loaded cupy: NCCL's plugin records the communicators that it makes.",
        ),
        (
            Bypass("mpi4py", (0, 1), True, "never"),
            "Ranks 0-1 loaded mpi4py: its calls are not recorded.",
        ),
        (
            Bypass("deep_ep", (3,), True, "other-version"),
            "Rank 3 loaded deep_ep: its calls are not recorded, because this version has other"
            " signatures.",
        ),
        (
            Bypass("deep_ep", (3,), True, "no-call"),
            "Rank 3 loaded deep_ep: its calls would be recorded, and none is among the records.",
        ),
    ],
)
def test_communication_past_torch(bypass: Bypass, words: str) -> None:
    assert past_torch(bypass) == words
