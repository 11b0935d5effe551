"""How strict verification starts on a node: nothing of an earlier start of the job is read, and
samples are chosen alike on all ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards.board import Board, PeerBoard
from commlens.boards.mirror import Mirror
from commlens.boards.refusal_log import DRAFTS, RefusalLog
from commlens.model.refusal import Refusal
from commlens.verification.messages import WordedRefusal
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals
from commlens.verification.verifier import Verifier


def verifier(folder: Path, rank: int) -> Verifier:
    return Verifier(folder, rank, timeout_s=lambda: 1.0)


def test_refusals_of_an_earlier_start_are_forgotten(tmp_path: Path) -> None:
    earlier = RefusalLog(tmp_path)
    earlier.post(7, 1, {"text": "of the earlier start", "ranks": [0, 1]})
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = Board(tmp_path / "rank0.1.board", 0, 1)
    B.STATIC.pack_into(left.map, 0, B.MAGIC, dead.pid, 0, 1)
    first = verifier(tmp_path, 0)
    assert not left.path.exists()
    assert RefusalLog(tmp_path).count() == 0
    posted = RefusalLog(tmp_path).post(7, 1, {"text": "of this start", "ranks": [0, 1]})
    second = verifier(tmp_path, 1)  # a rank of the same start forgets nothing
    assert posted["text"] == RefusalLog(tmp_path).read(0)["text"] == "of this start"
    first.close()
    second.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.before_end(),
        lambda one: one.before_wait(1),
        lambda one: one.before_planned_wait(None, 1, 0, [], 1),
        lambda one: one.check_wait_in_cpp(None, 0),
        lambda one: one.announce_accepted(SimpleNamespace(args=SimpleNamespace(op="all_to_all"))),
        lambda one: one.plan(None, 0, None),
        lambda one: one.refusal_for(RuntimeError("of the backend")),
    ],
)
def test_an_error_of_its_own_switches_it_off_and_does_not_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Verifier], object]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the file is gone")

    one = verifier(tmp_path, 0)
    monkeypatch.setattr(one._refusals, "raise_new", fail)
    monkeypatch.setattr(one._announcer, "channel", fail)
    assert not call(one)
    assert not one.is_active
    assert not PeerBoard(one._board.path).word(B.ACTIVE)  # else peers would wait for it
    one.close()


def test_a_refusal_that_the_watchdog_thread_posts_is_left_to_the_waiting_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = verifier(tmp_path, 0)
    args: Any = None

    def refuse(*_: object) -> None:
        RefusalLog(tmp_path).post(7, 1, {"text": "never arrived", "ranks": [0, 1]})
        one._refusals.raise_new()

    monkeypatch.setattr(one._announcer, "channel", lambda _: SimpleNamespace(slot=1))
    monkeypatch.setattr(one._late, "check_in_flight", refuse)
    one.check_wait_in_cpp(args, 0)
    assert one.unraised_refusal() == "never arrived" and one.is_active
    one.close()


def test_copies_by_a_relay_of_an_earlier_start_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Board(tmp_path / "rank0.1.board", 0, job_dirs.start_ticks(os.getpid()))
    copy = Mirror(tmp_path, 1)
    copy.publish()
    assert Peers(tmp_path, 0, own.path, 0).get(1) is not None
    ticks = job_dirs.start_ticks
    # this process started after the relay
    monkeypatch.setattr(job_dirs, "start_ticks", lambda pid: ticks(pid) + 1)
    peers = Peers(tmp_path, 0, own.path, 0)
    monkeypatch.setattr(job_dirs, "start_ticks", ticks)
    assert peers.get(1) is None


def test_a_silent_copy_is_doubtful_and_then_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Board(tmp_path / "rank0.1.board", 0, job_dirs.start_ticks(os.getpid()))
    copy = Mirror(tmp_path, 1)
    copy.apply(B.ACTIVE, (1).to_bytes(8, "little"))
    copy.publish()
    peers = Peers(tmp_path, 0, own.path, 0)
    assert peers.elsewhere([0, 1]) == [] and peers.get(1) is not None
    assert peers.elsewhere([0, 1]) == peers.all_elsewhere() == [1]
    copy.heard(time.monotonic())
    assert not peers.any_doubtful([1])
    copy.heard(time.monotonic() - 2)
    assert peers.any_doubtful([1])
    peers.give_up_without_relay([1])
    assert peers.elsewhere([1]) == [1]
    copy.heard(time.monotonic() - 60)
    for _ in range(2):
        peers.give_up_without_relay([1])
    assert peers.any_doubtful([1])
    assert peers.elsewhere([1]) == []
    assert peers[1].word(B.ACTIVE) == 0
    assert [record.getMessage() for record in caplog.records].count(
        "commlens: the relay of this node has stopped: rank 0 no longer compares with ranks on"
        " other nodes"
    ) == 1
    copy.apply(B.ENDED, (1).to_bytes(8, "little"))
    assert peers.how_it_ended(1) == "was killed or crashed"
    assert not peers.any_doubtful([1])


def test_a_refusal_that_concerns_other_nodes_waits_for_the_relays_word(tmp_path: Path) -> None:
    log = RefusalLog(tmp_path)
    bells: Any = SimpleNamespace(ring=lambda _: None, wake=lambda _: None)
    refusals = Refusals(log, 1, bells)
    refusals.reach_other_nodes(
        RefusalLog(tmp_path, DRAFTS), lambda ranks: [rank for rank in ranks if rank > 1]
    )
    pending: Any = SimpleNamespace(channel=SimpleNamespace(key=7, members=(0, 1, 2)), number=3)
    other = {"text": "by rank 2", "kind": "dead", "ranks": [0, 1, 2]}
    threading.Timer(0.05, lambda: log.post(7, 3, other)).start()
    with pytest.raises(Exception, match="by rank 2") as refused:
        refusals.post(pending, WordedRefusal(Refusal("mismatch/op"), "by rank 1"))
    assert refused.value.kind == "dead"  # type: ignore[attr-defined]
    assert RefusalLog(tmp_path, DRAFTS).read(0)["text"] == "by rank 1"
    pending.channel.members = (0, 1)  # a group within the node
    with pytest.raises(Exception, match="by rank 1 here"):
        refusals.post(
            pending, WordedRefusal(Refusal("mismatch/op"), "by rank 1 here"), about=(8, 1)
        )
