"""The result of a rank of ``run_on_ranks``."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path

import pytest

from commlens.testing.ranks import FailedRank, Rank


def ended(folder: Path, command: str, result: bytes | None) -> Rank:
    file = folder / "result0"
    if result is not None:
        file.write_bytes(result)
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE) as process:
        pass
    rank = Rank(0, process, file, folder / "output0")
    rank.read_result()
    return rank


VALUE = pickle.dumps({"value": 7, "at": 5.0})
ERROR = pickle.dumps({"error": "Traceback", "kind": "ValueError: no", "at": 5.0})


@pytest.mark.parametrize(
    ("command", "result", "failure"),
    [
        ("exit 0", VALUE, None),
        (
            "exit 3",
            VALUE,
            FailedRank("its process exited with status 3 after the function returned", 5.0),
        ),
        ("exit 1", ERROR, FailedRank("ValueError: no", 5.0, "Traceback")),
        (
            "exit 3",
            None,
            FailedRank("its process exited with status 3 before the function returned"),
        ),
    ],
)
def test_a_rank_has_failed_unless_it_left_a_value_and_ended_well(
    tmp_path: Path, command: str, result: bytes | None, failure: FailedRank | None
) -> None:
    rank = ended(tmp_path, command, result)
    assert rank.failure == failure


def test_a_result_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    failure = ended(tmp_path, "exit 0", b"damaged").failure
    assert failure is not None and failure.words.startswith("its result cannot be unpickled here: ")
