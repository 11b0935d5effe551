"""Boards and bells in C++ and in Python have the same layout and understand each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.boards import board as B
from commlens.boards import refusal_log, wakeup
from commlens.boards.board import Board, PeerBoard
from commlens.boards.refusal_log import RefusalLog
from commlens.boards.wakeup import Bells
from commlens.native import cache
from commlens.verification.verifier import Verifier

pytestmark = pytest.mark.launches

KEY = B.key_of("a channel")


@pytest.fixture
def module(native_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cache, "_loaded", None)
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(native_cache))
    return cache.load()


class Rank:
    """A rank's board, and the exchange in C++ that announces on it."""

    def __init__(self, module: Any, folder: Path, rank: int) -> None:
        self.refusals = RefusalLog(folder)
        self.board = Board(folder / f"rank{rank}.1{B.SUFFIX}", rank, 1)
        self.exchange = module.Exchange(self.board.map, self.refusals.map, rank)
        self.exchange.caught_up(True, 0, None)
        self.slot = self.board.add_channel(KEY, {"ranks": [0, 1]})


def test_cpp_and_python_have_the_same_layouts(module: Any) -> None:
    for name, value in module.board_layout().items():
        assert value == getattr(B, name), name
    layout = module.bells_layout()
    assert layout.pop("bell of 300") == wakeup._bell(300)
    for name, value in layout.items():
        assert value == getattr(wakeup, name), name
    assert (refusal_log._COUNT, refusal_log._BOARDS) == (0, 1)


def test_python_reads_what_cpp_announces_and_withdraws(module: Any, tmp_path: Path) -> None:
    ours = Rank(module, tmp_path, 0)
    read = PeerBoard(ours.board.path)
    for number in (*range(1, 40), 1 << B.ROUND_SHIFT | 1):
        ours.exchange.announce(ours.slot, number, 7 * number, 64, 3)
        assert read.announced(read.slot(KEY), number) == (7 * number, 64, 3)
        assert read.last_number(ours.slot) == number
    assert read.announced(ours.slot, 39) is not None
    assert read.announced(ours.slot, 38 - B.ENTRIES) is None
    ours.exchange.announce(ours.slot, 40, 1, 1, 0)
    ours.exchange.withdraw(ours.slot, 40)
    assert read.announced(ours.slot, 40) is None
    assert read.last_number(ours.slot) == 39


def test_cpp_and_python_wake_each_other(module: Any, tmp_path: Path) -> None:
    ours, theirs = Rank(module, tmp_path, 0), Bells(RefusalLog(tmp_path).map, 1)
    heard = theirs.listen(0, thread=1)
    ours.exchange.ring([1])
    assert theirs.listen(0, thread=1) == heard + 1
    heard = ours.exchange.listen(1, 5)
    theirs.ring([0])
    ours.exchange.sleep(1, heard)  # returns at once: it has rung
    assert ours.exchange.listen(1, 5) == heard + 1
    ours.exchange.awake(5)


def test_a_rank_without_a_board_before_any_was_looked_for(module: Any, tmp_path: Path) -> None:
    """The rank may have ended before this one issued its first collective."""
    verifier = Verifier(tmp_path, 0, timeout_s=lambda: 1.0, make_exchange=module.Exchange)
    try:
        assert verifier._peers.among([0, 1]) == []
        verifier._update_exchange()
        assert verifier.is_active
    finally:
        verifier.close()
