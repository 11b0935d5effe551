"""The records of calls past torch's dispatcher."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from new_boxes import new_box

pytest.importorskip("torch")

import torch

from commlens.blackbox import layout as L
from commlens.blackbox.reader import read_box, read_status
from commlens.capture.recorder import Recorder
from commlens.model.collective import QUEUE, State
from commlens.tap import libraries, message_queues
from commlens.tap.groups import Groups
from commlens.tap.hand_made import Membership
from commlens.tap.libraries import LibraryCall, LibraryGroup
from past_torch import adapted

MADE = Membership(1, 3, "ray/weights", 2)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(new_box(tmp_path), Groups())


def call(op: str = "broadcast", **about: Any) -> LibraryCall:
    return LibraryCall(LibraryGroup("ray", made=MADE), op, torch.ones(3, 2), **about)


def test_a_call_has_a_record_like_a_collective(recorder: Recorder) -> None:
    calls = recorder.library_calls
    token = calls.begin(call(root=2), 5, "ray.NCCLGroup.broadcast", sys._getframe())
    (op,) = read_box(recorder.writer.path).collectives
    assert (op.op, op.sequence_number, op.args.root, op.state) == ("broadcast", 5, 2, State.ISSUED)
    assert op.in_flight
    assert op.channel.library == "ray"
    assert op.channel.group.hand_made is not None
    assert op.channel.group.hand_made.store == "ray/weights"
    assert [(spec.shape, spec.dtype) for spec in op.args.inputs] == [((3, 2), "float32")]
    assert op.stack[0].function == "test_a_call_has_a_record_like_a_collective"
    assert calls.oldest() is token
    calls.end(token, None)
    assert calls.oldest() is None
    (op,) = read_box(recorder.writer.path).collectives
    assert (op.state, op.returned_ns > 0) == (State.UNKNOWN, True), "its device may not be done"


def test_how_calls_end(recorder: Recorder) -> None:
    calls = recorder.library_calls
    calls.end(calls.begin(call(waits=True), 1, "a", None), None)
    calls.end(calls.begin(call(), 2, "a", None), ValueError("no such rank"))
    done, failed = read_box(recorder.writer.path).collectives
    assert (done.state, done.done_ns > 0) == (State.COMPLETED, True)
    assert (failed.state, failed.error) == (State.FAILED, "ValueError: no such rank")


def test_blobs_that_were_overwritten_are_written_again(recorder: Recorder) -> None:
    calls, of = recorder.library_calls, call()
    for number in range(1, 20):
        for _ in range(12):
            recorder.writer.add_blob({"k": "text", "text": "x" * 8_000})
        calls.end(calls.begin(of, number, "a", None), None)
    newest = read_box(recorder.writer.path).collectives[-1]
    assert (newest.sequence_number, newest.channel.library) == (19, "ray")


def test_the_libraries_are_in_the_box(recorder: Recorder) -> None:
    recorder.library_calls.note_libraries()
    assert read_box(recorder.writer.path).adapters == {}
    with adapted([]):
        libraries.states |= {"deep_ep": "applied", "vllm": "other-version"}
        recorder.library_calls.note_libraries()
    log = read_box(recorder.writer.path)
    assert log.adapters == {"deep_ep": "applied", "vllm": "other-version"}


def test_queues_are_noted_once_they_are_quiet(recorder: Recorder) -> None:
    calls, path = recorder.library_calls, recorder.writer.path
    with adapted([]):
        writer = message_queues.QueueEnd(Membership(0, 3, "vm/psm_1", 0), 4)
        reader = message_queues.QueueEnd(Membership(2, 3, "vm/psm_2", 0), 4)
        ends = [EndOfQueue(), EndOfQueue()]
        message_queues.queues[ends[0]], message_queues.queues[ends[1]] = writer, reader
        writer.done, reader.done = 9, 5
        writer.begins("enqueue")
        now = writer.moved_ns
        calls.note_queues(now + 100_000_000)
        assert read_box(path).setups == []
        calls.note_queues(now + 600_000_000)
        log = read_box(path)
        assert [(op.op, op.sequence_number, op.state) for op in log.setups] == [
            ("dequeue", 0, State.COMPLETED),
            ("dequeue", 5, State.COMPLETED),
            ("dequeue", 6, State.ISSUED),  # its place is taken by message 10 of a queue of 4
        ]
        assert {op.channel.device for op in log.setups} == {QUEUE}
        assert not log.is_idle
        assert read_status(path.read_bytes()[: L.HEADER_SIZE]).queue_since_mono_ns == now
        writer.ends(1)
        reader.begins("dequeue")
        calls.note_queues(reader.moved_ns + 100_000_000)
        assert read_status(path.read_bytes()[: L.HEADER_SIZE]).queue_since_mono_ns == 0
        calls.note_queues(reader.moved_ns + 600_000_000)
        log = read_box(path)
        assert [op.sequence_number for op in log.setups] == [0, 6]
        assert log.is_idle
        head = recorder.writer.side_floor
        calls.note_queues(time.monotonic_ns() + 10_000_000_000)
        assert recorder.writer.side_floor == head, "nothing has changed"


def test_a_queue_that_is_quiet_is_noted_while_another_one_moves(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, path = recorder.library_calls, recorder.writer.path
    with adapted([]):
        still = message_queues.QueueEnd(Membership(1, 3, "vm/psm_1", 0), 4)
        moving = message_queues.QueueEnd(Membership(0, 3, "vm/psm_2", 0), 4)
        ends = [EndOfQueue(), EndOfQueue()]
        message_queues.queues[ends[0]], message_queues.queues[ends[1]] = still, moving
        now = time.monotonic_ns()
        still.moved_ns = moving.moved_ns = now - 10**9
        calls.note_queues(now)
        still.done, moving.done, moving.op = 7, 9, "enqueue"
        still.moved_ns, moving.moved_ns = now, now + 10**9
        calls.note_queues(now + 10**9)
        log = read_box(path)
        assert [op.sequence_number for op in log.setups] == [7, 0], "no writer waits"
        assert read_status(path.read_bytes()[: L.HEADER_SIZE]).queue_since_mono_ns == 0

        class Changing(dict[Any, Any]):
            def values(self) -> Any:
                raise RuntimeError("dictionary changed size during iteration")

        monkeypatch.setattr(message_queues, "queues", Changing())
        calls.note_queues(now + 3 * 10**9)


def test_ever_new_shapes_take_no_more_memory(recorder: Recorder) -> None:
    calls = recorder.library_calls
    for rows in range(1200):
        made = call()._replace(tensor=torch.empty(rows, 2, device="meta"))
        calls.end(calls.begin(made, rows, "a", None), None)
    assert len(calls._blobs) <= 1024
    newest = read_box(recorder.writer.path).collectives[-1]
    assert newest.args.inputs[0].shape == (1199, 2)


class EndOfQueue:
    """What a program holds of a queue."""
