"""Tests of src/commlens/verification/cycles.py: ranks that wait for each other, found by their boards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards.board import Board
from commlens.boards.refusal_log import RefusalLog
from commlens.verification.cycles import Cycles
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals

KEYS = (7, 8)  # of two groups of both ranks
LONG_AGO_NS = 1_000_000_000


@pytest.fixture
def boards(tmp_path: Path) -> list[Board]:
    """The boards of two ranks; each has announced one collective, in another group than the other,
    and waits for the other.
    """
    made = [
        Board(
            tmp_path / f"rank{rank}.{os.getpid()}{B.SUFFIX}",
            rank,
            job_dirs.start_ticks(os.getpid()),
        )
        for rank in (0, 1)
    ]
    for rank, board in enumerate(made):
        slots = [board.add_channel(key, {"group": str(key), "ranks": [0, 1]}) for key in KEYS]
        board.set_word(B.THREADS, 1)
        board.announce(slots[rank], 1, 0, board.add_blob({"op": "all_reduce"}), 0)
        board.set_waiting(KEYS[rank], 1, time.monotonic_ns() - LONG_AGO_NS)
    return made


def test_a_rank_that_has_yet_to_raise_a_refusal_does_not_wait(
    tmp_path: Path, boards: list[Board]
) -> None:
    refusals = Refusals(RefusalLog(tmp_path), 0, SimpleNamespace())
    peers = Peers(tmp_path, 0, boards[0].path, 0)
    peers.among([0, 1])
    cycles = Cycles(peers, refusals)
    assert cycles.find() == [(0, KEYS[0], 1), (1, KEYS[1], 1)]
    RefusalLog(tmp_path).post(KEYS[0], 1, {"kind": "cycle", "text": "", "ranks": [0, 1]})
    # Rank 0 raises it and, in its next collective, has waited for long; rank 1 has not run since
    # the refusal.
    boards[0].set_waiting(KEYS[0], 1, time.monotonic_ns())
    time.sleep(0.4)
    assert cycles.wait_of(0) == (0, KEYS[0], 1)
    assert cycles.find() is None, "rank 1 is about to raise the refusal"
    boards[1].set_waiting(KEYS[1], 1, time.monotonic_ns())
    time.sleep(0.4)
    assert cycles.find() == [(0, KEYS[0], 1), (1, KEYS[1], 1)], "a new wait counts"


def test_of_many_refusals_only_those_since_the_wait_are_read(
    tmp_path: Path, boards: list[Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may catch each refusal and go on."""
    log = RefusalLog(tmp_path)
    for number in range(50):
        log.post(KEYS[0], number, {"kind": "mismatch", "text": "", "ranks": [0, 1]})
    refusals = Refusals(log, 0, SimpleNamespace())
    began = time.monotonic_ns()
    log.post(KEYS[1], 1, {"kind": "mismatch", "text": "", "ranks": [1]})
    read, reads = log.read, []
    monkeypatch.setattr(log, "read", lambda at: reads.append(at) or read(at))
    assert refusals.concern_since(1, began) and reads == [50]
    assert not refusals.concern_since(0, began) and reads == [50, 50, 49]
    assert refusals.concern_since(0, 0)
