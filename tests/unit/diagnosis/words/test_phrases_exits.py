"""How processes ended, in words: one wording for each way, with the number of the verb."""

from __future__ import annotations

from typing import get_args

import pytest

from commlens.diagnosis.index.process_exit import How, ProcessExit
from commlens.diagnosis.words.phrases import exit_words


@pytest.mark.parametrize(
    ("end", "one", "several"),
    [
        pytest.param(
            ProcessExit("own", how="exited", status="3"),
            "exited with status 3",
            "exited with status 3",
            id="status",
        ),
        pytest.param(
            ProcessExit("own", how="exited", status="-9", signal="SIGKILL"),
            "was killed by SIGKILL",
            "were killed by SIGKILL",
            id="status of a signal",
        ),
        pytest.param(
            ProcessExit("peer", how="exited", status="1", error="Connection closed by peer"),
            "exited with status 1 after Connection closed by peer",
            "exited with status 1 after Connection closed by peer",
            id="after an error",
        ),
        pytest.param(
            ProcessExit("clean", how="exited", status="1", was_exiting=True),
            "exited with status 1 after it had destroyed its last process group",
            "exited with status 1 after they had destroyed their last process group",
            id="at its end",
        ),
        pytest.param(
            ProcessExit("peer", how="raised", refused=True),
            "raised DistributedOperationException",
            "raised DistributedOperationException",
            id="refused",
        ),
        pytest.param(
            ProcessExit("own", how="died", signal="SIGSEGV", was_exiting=True),
            "died of SIGSEGV while it was exiting",
            "died of SIGSEGV while they were exiting",
            id="crash at exit",
        ),
        pytest.param(
            ProcessExit("own", how="died"), "died of a signal", "died of a signal", id="unknown"
        ),
        pytest.param(
            ProcessExit("gone", how="is-gone"),
            "is gone; how it ended was not observed",
            "are gone; how they ended was not observed",
            id="gone",
        ),
    ],
)
def test_how_processes_ended(end: ProcessExit, one: str, several: str) -> None:
    assert exit_words(end) == one
    assert exit_words(end, [1, 2]) == several


def test_every_way_has_words() -> None:
    words = [exit_words(ProcessExit("own", how=how, signal="SIGTERM")) for how in get_args(How)]
    assert all(words) and len(set(words)) == len(words)
