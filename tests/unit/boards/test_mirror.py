"""Copies of boards on other nodes: a feed reads a board, and a mirror writes the same bytes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards.board import Board, PeerBoard
from commlens.boards.mirror import Feed, Mirror

HERE = (0, 1)  # ranks of the node of the board


@pytest.fixture
def board(tmp_path: Path) -> Board:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    return Board(tmp_path / "here" / "rank1.1.board", 1, job_dirs.start_ticks(os.getpid()))


class Copy:
    """A board's copy on another node."""

    def __init__(self, board: Board, folder: Path) -> None:
        self.feed = Feed(PeerBoard(board.path), lambda ranks: bool(set(ranks) - set(HERE)))
        self.mirror = Mirror(folder / "there", 1)
        self.mirror.publish()
        self.read = PeerBoard(self.mirror.path)

    def news(self) -> int:
        writes = self.feed.news()
        for write in writes:
            self.mirror.apply(*write)
        return sum(len(content) for _, content in writes)

    def rest(self, *, waits: bool = False) -> None:
        for write in self.feed.rest(waits=waits):
            self.mirror.apply(*write)


def test_announcements_arrive_with_what_they_refer_to(board: Board, tmp_path: Path) -> None:
    copy = Copy(board, tmp_path)
    slot = board.add_channel(7, {"group": "dp", "ranks": [0, 1, 2, 3]})
    for number in range(1, 41):
        board.announce(
            slot, number, number * 11, board.add_blob({"op": "all_reduce", "n": number}), 2
        )
        copy.news()
        signature, blob, extra = copy.read.announced(copy.read.slot(7), number) or (0, 0, 0)
        assert (signature, extra, copy.read.blob(blob)) == (
            number * 11,
            2,
            {"op": "all_reduce", "n": number},
        )
    assert copy.read.channel(7) == {"group": "dp", "ranks": [0, 1, 2, 3]}
    assert copy.read.is_past(copy.read.slot(7), 20)
    assert copy.read.rank == 1
    assert copy.read.is_remote
    assert not PeerBoard(board.path).is_remote


def test_a_copy_that_starts_late_or_skips_some_holds_the_newest(
    board: Board, tmp_path: Path
) -> None:
    slot = board.add_channel(7, {"ranks": [0, 1, 2]})
    copy = Copy(board, tmp_path)
    for number in range(1, 101):
        board.announce(slot, number, number, 0, 0)
    copy.news()
    assert [copy.read.announced(slot, number) is not None for number in (84, 85, 100)] == [
        False,
        True,
        True,
    ]


def test_withdrawn_and_announced_anew_between_two_looks(board: Board, tmp_path: Path) -> None:
    copy = Copy(board, tmp_path)
    slot = board.add_channel(7, {"ranks": [1, 2]})
    board.announce(slot, 1, 10, 0, 0)
    copy.news()
    board.withdraw(slot, 1)
    copy.news()
    assert copy.read.announced(slot, 1) is None
    assert copy.read.last_number(slot) == 0
    board.announce(slot, 1, 10, 0, 0)
    copy.news()
    board.withdraw(slot, 1)
    board.announce(slot, 1, 99, 0, 0)
    copy.news()
    copy.rest()
    assert copy.read.announced(slot, 1) == (99, 0, 0)
    retried = 1 << B.ROUND_SHIFT | 1
    board.announce(slot, retried, 5, 0, 0)
    copy.news()
    assert copy.read.announced(slot, retried) == (5, 0, 0)


def test_a_group_within_the_node_sends_nothing_until_ranks_wait(
    board: Board, tmp_path: Path
) -> None:
    copy = Copy(board, tmp_path)
    slot = board.add_channel(9, {"group": "tp", "ranks": [0, 1]})
    copy.news()
    for number in range(1, 50):
        board.announce(slot, number, number, 0, 0)
        assert copy.news() == 0
    copy.rest()
    assert copy.read.last_number(copy.read.slot(9)) == 0
    # Only the graph of waiting ranks needs it.
    began = time.monotonic_ns() - 5_000_000_000
    board.set_waiting(9, 50, began)
    copy.rest(waits=True)
    assert copy.read.last_number(copy.read.slot(9)) == 49
    assert (copy.read.word(B.WAITING), copy.read.word(B.WAITING_NUMBER)) == (9, 50)
    assert abs(copy.read.word(B.WAITING_SINCE) - began) < 1_000_000_000
    board.set_waiting(0, 0, 0)
    copy.rest(waits=True)
    assert copy.read.word(B.WAITING) == 0


def test_words_of_the_rank_arrive_and_those_of_the_copy_stay(board: Board, tmp_path: Path) -> None:
    copy = Copy(board, tmp_path)
    board.set_word(B.ACTIVE, 1)
    board.set_word(B.THREADS, 2)
    copy.news()
    copy.rest()
    assert (copy.read.word(B.ACTIVE), copy.read.word(B.THREADS), copy.read.word(B.REMOTE)) == (
        1,
        2,
        B.LINKED,
    )
    copy.mirror.apply(B.REMOTE, bytes(8))
    assert copy.read.is_remote
    copy.mirror.lose()
    assert (copy.read.word(B.ACTIVE), copy.mirror.is_lost) == (0, True)
    board.close()
    copy.news()
    assert copy.read.word(B.CLOSED) == 1


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 8), (56, 8), (B.SIZE, 8), (B.SIZE - 4, 8), (4000, 200), (-8, 8)]
)
def test_bytes_that_do_not_belong_on_a_copy_are_refused(
    board: Board, tmp_path: Path, offset: int, size: int
) -> None:
    with pytest.raises(ValueError, match="a write of"):
        Copy(board, tmp_path).mirror.apply(offset, bytes(size))


def test_a_rank_can_give_a_copy_up_for_all(board: Board, tmp_path: Path) -> None:
    copy = Copy(board, tmp_path)
    board.set_word(B.ACTIVE, 1)
    copy.news()
    copy.read.give_up()
    assert (copy.read.word(B.ACTIVE), copy.read.word(B.REMOTE)) == (0, B.LOST)
    copy.mirror.remove()
    assert list((tmp_path / "there").iterdir()) == []
