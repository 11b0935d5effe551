"""Black boxes read while another process writes them as fast as it can, and boxes written by the
package's own writer.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boxes
import pytest
from boxes import MONO, UNIX, Box

from commlens.blackbox import layout as L
from commlens.blackbox.reader import OpenBox, read_box
from commlens.blackbox.writer import BoxWriter
from commlens.model.collective import Collective, FrameKind, LearnedHow, State
from commlens.model.ranklog import RankLog

pytestmark = pytest.mark.launches

CAPACITY = 64


class Slowly:
    """A map that takes what is written to it eight bytes at a time, so that a reader often comes in
    between.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped = mapped

    def __setitem__(self, where: slice, content: bytes) -> None:
        for at in range(0, len(content), 8):
            piece = content[at : at + 8]
            self.mapped[where.start + at : where.start + at + len(piece)] = piece


class SlowBox(Box):
    """A box in a file that is written in place."""

    def put_into(self, path: Path) -> None:
        path.write_bytes(self.data)
        with path.open("r+b") as file:
            self.mapped = mmap.mmap(file.fileno(), 0)
        self.words = memoryview(self.mapped).cast("Q")
        self.data = Slowly(self.mapped)  # type: ignore[assignment]

    def word(self, offset: int, value: int) -> None:
        if hasattr(self, "words"):
            # live words are written whole: struct.pack_into would clear them first
            self.words[offset // 8] = value
        else:
            super().word(offset, value)


def write_for_ever(path: str) -> None:
    """The writer process: every field of every record follows from its index, every blob's text
    from its number.
    """
    box = SlowBox(capacity=CAPACITY)
    box.put_into(Path(path))
    group, number = box.group(), 0
    print("writing", flush=True)
    while True:
        number += 1
        if number % 500 == 1:
            group = box.group(ranks=f"0-{number}")
            line = [["/home/me/train.py", number, f"f{number}"]] * (number % 400)
            box.evidence(
                [{"tid": number, "name": str(number), "main": True, "f": line}], MONO + number * 100
            )
        asked = box.asked(op=f"op{number}", shape=(number, number * 2))
        stack = box.stack(*[("/home/me/train.py", number, f"f{number}")] * (number % 10 + 1))
        for _ in range(5):
            index = box.index + 1
            box.record(
                group=group,
                asked=asked,
                stack=stack,
                seq=number,
                step=index * 7,
                coalescing_id=index * 11,
                tag=-index,
                thread=index & 0x7FFFFFFF,
                at=MONO + index * 1_000,
            )
            box.mark(index, boxes.RETURNED, MONO + index * 1_000 + 200)
            box.outcome(index, 1, 2, index & 0x7FFFFFFF)
            box.mark(index, boxes.DONE, MONO + index * 1_000 + 300)


def check(log: RankLog) -> None:
    """That every record is one that the writer wrote, whole."""
    for got in log.collectives:
        assert got.step == got.index * 7
        assert got.coalescing_id == got.index * 11
        assert got.tag == -got.index
        assert got.issue_thread == got.index & 0x7FFFFFFF
        assert got.announced_ns == UNIX + got.index * 1_000
        assert got.returned_ns in (0, got.announced_ns + 200)
        assert got.done_ns in (0, got.announced_ns + 300)
        assert got.wait_thread in (0, got.issue_thread)
        assert got.sequence_number == (got.index - 1) // 5 + 1
        if got.op != "unknown":
            assert got.op == f"op{got.sequence_number}"
            assert got.args.inputs[0].shape == (got.sequence_number, got.sequence_number * 2)
        assert {frame.line for frame in got.stack} <= {got.sequence_number}
    indices = [got.index for got in log.collectives]
    assert indices == sorted(set(indices))
    assert not indices or indices[-1] - indices[0] < CAPACITY
    for thread in log.stacks:
        assert {frame.line for frame in thread.frames} <= {thread.thread}
        assert thread.taken_ns == UNIX + thread.thread * 100


@contextmanager
def writer(path: Path, loop: str = "write_for_ever") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", f"import test_writer; test_writer.{loop}({str(path)!r})"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.timeout(60)
def test_no_torn_record_is_taken_for_a_good_one(tmp_path: Path) -> None:
    path = tmp_path / "rank0.1.box"
    with writer(path) as process, OpenBox(path) as box:
        seen: set[int] = set()
        reads = whole = 0
        ends = time.monotonic() + 6
        while time.monotonic() < ends:
            log = box.log()
            check(log)
            check(read_box(box.packed()))
            seen.update(got.index for got in log.collectives)
            reads += 1
            whole += len(log.collectives)
            # A record is whole a moment before it is counted.
            assert box.status().issued + 1 >= (log.collectives[-1].index if log.collectives else 0)
        assert process.poll() is None
        assert reads > 20
        assert len(seen) > 10 * CAPACITY  # the ring went round and round meanwhile
        assert whole > reads * CAPACITY / 2  # and yet most of it could be read each time


@pytest.mark.timeout(60)
def test_a_writer_killed_at_any_moment_leaves_a_readable_box(tmp_path: Path) -> None:
    for attempt in range(5):
        path = tmp_path / f"rank0.{attempt + 1}.box"
        with writer(path) as process:
            time.sleep(0.02 * attempt)
            process.send_signal(signal.SIGKILL)
            process.wait(10)
            log = read_box(path)
            check(log)
            assert len(log.collectives) >= min(log.issued, CAPACITY) - 2
            assert log == read_box(path, captured_ns=log.captured_ns)


def beat_for_ever(path: str) -> None:
    """The package's own writer, which only ever counts upwards."""
    box = BoxWriter(
        Path(path), capacity=8, rank=0, world_size=1, local_rank=0, start_ticks=1, about={}
    )
    group = box.add_blob(
        {"k": "group", "name": "0", "ranks": "0-3", "backend": "gloo", "device": "cpu", "inc": 0}
    )
    asked = box.add_blob({"k": "asked", "op": "all_reduce", "dop": "allreduce_", "in": []})
    for number in range(1, 1 << 62):
        box.word(L.STEPS, number)
        box.heartbeat()
        index, now = box.next_index(), time.monotonic_ns()
        slot = box.announce(
            L.Record(
                index, now, group, asked, sequence_number=index, thread=7, flags=L.FLAG_ENTERED
            )
        )
        box.wait_began(slot, index, now, 7, True)
        box.wait_completed(slot, index, now, 7)
        if number == 100:
            print("writing", flush=True)


@pytest.mark.timeout(60)
def test_a_live_word_is_never_seen_half_written(tmp_path: Path) -> None:
    path = tmp_path / "rank0.1.box"
    places = [at // 8 for at in (L.HEARTBEAT_MONO, L.NEXT_INDEX, L.STEPS)]
    with writer(path, "beat_for_ever"), path.open("rb") as file:
        words = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)).cast("Q")
        before = [words[at] for at in places]
        for _ in range(200_000):
            now = [words[at] for at in places]
            assert all(old <= new for old, new in zip(before, now, strict=True)), (before, now)
            before = now


@pytest.fixture
def written(tmp_path: Path) -> BoxWriter:
    prefixes = {"torch": boxes.TORCH, "commlens": boxes.COMMLENS, "python": [boxes.STDLIB]}
    about = {
        "job": "j1",
        "host": "n01",
        "script": "train.py --big",
        "torch": "2.13.0",
        "prefixes": prefixes,
    }
    path = tmp_path / "rank2.77.box"
    return BoxWriter(
        path, capacity=8, rank=2, world_size=4, local_rank=1, start_ticks=5, about=about
    )


class TestTheRealWriter:
    def announce(self, box: BoxWriter, **fields: int) -> tuple[int, int, int]:
        group = box.add_blob(
            {
                "k": "group",
                "name": "0",
                "desc": "default_pg",
                "ranks": "0-3",
                "backend": "gloo",
                "device": "cpu",
                "inc": 0,
            }
        )
        asked = box.add_blob(
            {
                "k": "asked",
                "op": "all_reduce",
                "dop": "allreduce_",
                "in": [[[3], "float32", "cpu", "strided", None]],
            }
        )
        stack = box.add_blob({"k": "stack", "f": [["/home/me/train.py", 57, "step"]]})
        index, now = box.next_index(), time.monotonic_ns()
        words = {
            "group": group,
            "asked": asked,
            "stack": stack,
            "module": 0,
            "sequence_number": index,
            "step": 3,
            "coalescing_id": 0,
            "tag": -7,
            "thread": 99,
            "flags": L.FLAG_ENTERED,
            "peer": -1,
            "members": 0,
        }
        return index, now, box.announce(L.Record(index, now, **(words | fields)))

    def read(self, box: BoxWriter) -> Collective:
        log = read_box(box.path)
        assert log.problems == []
        return log.collectives[-1]

    def test_the_header(self, written: BoxWriter) -> None:
        before = time.time_ns()
        written.word(L.PHASE, L.PHASE_INITIALISED)
        written.word(L.STEPS, 12)
        written.heartbeat()
        log = read_box(written.path)
        assert (log.rank, log.world_size, log.local_rank, log.pid) == (2, 4, 1, os.getpid())
        assert (log.job, log.host, log.script, log.versions) == (
            "j1",
            "n01",
            "train.py --big",
            {"torch": "2.13.0"},
        )
        assert (log.initialised, log.steps, log.problems) == (True, 12, [])
        assert before <= log.heartbeat_ns <= log.captured_ns

    def test_the_life_of_an_op(self, written: BoxWriter) -> None:
        before = time.time_ns()
        index, now, slot = self.announce(written)
        got = self.read(written)
        assert (got.state, got.sequence_number, got.tag, got.step, got.issue_thread, got.peer) == (
            State.ISSUED,
            1,
            -7,
            3,
            99,
            None,
        )
        assert abs(got.announced_ns - before) < 10**9
        written.mark(slot, L.RETURNED, index, now + 1_000)
        written.mark(slot, L.WAIT_BEGAN, index, now + 2_000)
        written.mark_outcome(slot, index, L.OUTCOME_NONE, L.HOW_NOT_YET, 123)
        got = self.read(written)
        assert got.waited_for
        assert got.wait_thread == 123
        written.mark(slot, L.WAIT_ENDED, index, now + 3_000)
        written.mark(slot, L.DONE, index, now + 3_000)
        written.mark_value(slot, L.REDUCE_OP, index, 1)
        written.mark_outcome(slot, index, L.OUTCOME_COMPLETED, L.HOW_WAIT, 123)
        got = self.read(written)
        assert (got.state, got.learned_how, got.args.reduce_op) == (
            State.COMPLETED,
            LearnedHow.WAIT,
            "SUM",
        )
        spans = [
            moment - got.announced_ns
            for moment in (got.returned_ns, got.wait_began_ns, got.wait_ended_ns, got.done_ns)
        ]
        assert all(
            abs(span - true) <= 100
            for span, true in zip(spans, (1_000, 2_000, 3_000, 3_000), strict=True)
        )

    def test_round_the_ring(self, written: BoxWriter) -> None:
        for _ in range(30):
            self.announce(written)
        log = read_box(written.path)
        assert ([got.index for got in log.collectives], log.issued, log.problems) == (
            [*range(23, 31)],
            30,
            [],
        )
        assert log.collectives[0].source is not None
        assert log.collectives[0].source.where == "train.py:57"

    def test_failure_exception_and_label(self, written: BoxWriter) -> None:
        index, _, slot = self.announce(written)
        written.mark_value(
            slot,
            L.FAILURE,
            index,
            written.add_blob({"k": "text", "text": "Connection reset \udce9"}),
        )
        written.mark_outcome(slot, index, L.OUTCOME_FAILED, L.HOW_WAIT)
        written.word(L.EXPECTING, written.add_blob({"k": "text", "text": "checkpoint"}))
        written.word(
            L.EXCEPTION,
            written.add_blob({"k": "exception", "text": "ValueError: x", "f": [["/a.py", 1, "f"]]}),
        )
        written.word(L.PHASE, L.PHASE_CLOSED_BY_EXCEPTION)
        log = read_box(written.path)
        assert (log.collectives[0].state, log.collectives[0].error) == (
            State.FAILED,
            "Connection reset ?",
        )
        assert (log.expecting, log.exception, log.closed) == ("checkpoint", "ValueError: x", True)

    def test_evidence(self, written: BoxWriter) -> None:
        for line in (1, 2, 3):
            thread = {
                "tid": 1,
                "name": "MainThread",
                "main": True,
                "f": [["/home/me/train.py", line, "load"], [f"{boxes.TORCH}/a.py", 2, "g"]],
            }
            written.write_evidence([thread], time.monotonic_ns())
            main = read_box(written.path).main_stack
            assert main is not None
            assert [(frame.line, frame.kind) for frame in main.frames] == [
                (line, FrameKind.USER),
                (2, FrameKind.TORCH),
            ]

    def test_the_largest_and_the_smallest(self, tmp_path: Path) -> None:
        for capacity in (1, L.CAPACITY_MAX):
            box = BoxWriter(
                tmp_path / f"rank0.{capacity}.box",
                capacity=capacity,
                rank=0,
                world_size=1,
                local_rank=0,
                start_ticks=1,
                about={},
            )
            self.announce(box)
            index, _, _ = self.announce(box)
            assert self.read(box).index == index
            box.path.unlink()
