"""When the watchdog thread asks torch's recorder about collectives on a device."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from commlens.capture import device_queues, torch_progress
from commlens.capture.device_queues import DeviceQueues

# not before the machine started, which may be less than ten minutes ago
NOW_NS = max(time.monotonic_ns() - 600 * 10**9, 0)
LATER_NS = NOW_NS + 3600 * 10**9


class Channel:
    """A group's channel, which carried a message."""

    pairs: ClassVar = {1: 1}
    backend = SimpleNamespace(uid="0", recorder="", watches=True)


def queues_with_one_in_flight(monkeypatch: pytest.MonkeyPatch) -> DeviceQueues:
    """One collective on a group that carries messages, too: only the entries of torch's recorder
    tell its state.
    """
    monkeypatch.setattr(torch_progress, "statuses", lambda: {"0": torch_progress.Status(1, -1, -1)})
    channel = Channel()
    token: Any = SimpleNamespace(
        args=SimpleNamespace(channel=channel, op="all_reduce"),
        result=None,
        hooked=None,
        backend_number=1,
        since=NOW_NS,
        waiting=False,
        known_how=0,
        offset=0,
        index=1,
    )
    writer = SimpleNamespace(capacity=100, last_index=1, mark_outcome=lambda *_: None)
    queues = DeviceQueues(SimpleNamespace(writer=writer, done=lambda *_: None))
    # the tests' clock starts here, however long ago this file was imported
    queues._asked_ns = NOW_NS
    queues.add(token)
    return queues


def test_a_capture_begins_when_no_query_is_under_way(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    asked, answer, began = threading.Event(), threading.Event(), threading.Event()

    def in_flight() -> None:
        asked.set()
        answer.wait(10)

    def capture() -> None:
        queues.capture_begins()
        began.set()

    monkeypatch.setattr(torch_progress, "in_flight", in_flight)
    monkeypatch.setattr(device_queues, "LONGEST_QUERY_S", 10.0)
    threads = [
        threading.Thread(target=queues.look, args=(LATER_NS,)),
        threading.Thread(target=capture),
    ]
    threads[0].start()
    assert asked.wait(10)
    threads[1].start()
    assert not began.wait(0.1)
    answer.set()
    assert began.wait(10)
    for thread in threads:
        thread.join(10)


def test_a_query_that_does_not_end_holds_no_capture_up(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    monkeypatch.setattr(device_queues, "LONGEST_QUERY_S", 0.05)
    began = []
    # as if by another thread
    monkeypatch.setattr(torch_progress, "in_flight", lambda: began.append(queues.capture_begins()))
    queues.look(LATER_NS)
    assert began


def test_nothing_is_queried_during_a_capture(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    queried = []
    monkeypatch.setattr(torch_progress, "in_flight", lambda: queried.append(1))
    queues.capture_begins()
    queues.look(LATER_NS)
    assert not queried
    queues.capture_ends()
    queues.look(LATER_NS + 10**10)
    assert queried == [1]


def asked(queues: DeviceQueues, monkeypatch: pytest.MonkeyPatch, at_s: float) -> bool:
    """Whether torch's recorder is asked in a look so many seconds after the collective was issued."""
    found: list[int] = []
    monkeypatch.setattr(torch_progress, "statuses", lambda: found.append(1) or {})
    queues.look(NOW_NS + int(at_s * 1e9))
    return bool(found)


def test_torchs_recorder_is_asked_once_a_group_has_fallen_quiet(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    assert [asked(queues, monkeypatch, at_s) for at_s in (0.5, 1.9, 2.5, 3.0, 3.6)] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_a_busy_group_is_asked_about_twice_a_minute(monkeypatch):
    queues = queues_with_one_in_flight(monkeypatch)
    answers = []
    for second in range(1, 41):
        issued: Any = SimpleNamespace(
            **vars(
                queues._added[0] if queues._added else next(iter(queues._queues.values())).tokens[0]
            )
        )
        issued.since = NOW_NS + int(second * 1e9)
        queues.add(issued)
        answers.append(asked(queues, monkeypatch, second + 0.1))
    assert answers.count(True) == 1


class Hooked:
    """A group whose backend has completion hooks, and what torch's hooks recorded of it.

    Its collectives were issued one second apart, the last of them two seconds before the look.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ops: str, entries: list[str]) -> None:
        channel: Any = Channel()
        channel.backend = SimpleNamespace(uid="", recorder="nccl2", watches=True)
        channel.group, channel.pairs, channel.busy = SimpleNamespace(name="dp"), {}, 0
        self.channel, self.now = channel, time.monotonic_ns()
        self.found: dict[int, str] = {}
        writer = SimpleNamespace(
            capacity=100, last_index=9, mark_outcome=lambda _, index, *__: self.note(index, "open")
        )
        tracker = SimpleNamespace(
            writer=writer, done=lambda token, *_: self.note(token.index, "done")
        )
        self.queues = DeviceQueues(tracker)
        self.queues._asked_ns = 0
        self.tokens = [
            self.token(channel, at, op, len(ops.split())) for at, op in enumerate(ops.split())
        ]
        for token in self.tokens:
            self.queues.add(token)
        made = [self.entry(at, one, len(entries)) for at, one in enumerate(entries)]
        monkeypatch.setattr(
            torch_progress.recorder_dumps,
            "read_recorder",
            lambda name: {"entries": made} if name == "nccl2" else {},
        )

    def note(self, index: int, state: str) -> None:
        self.found[index] = state

    def token(self, channel: Any, at: int, op: str, count: int) -> Any:
        return SimpleNamespace(
            args=SimpleNamespace(channel=channel, op=op),
            result=None,
            hooked=None,
            backend_number=at + 1,
            since=self.now - (count - at + 2) * 10**9,
            waiting=False,
            known_how=0,
            offset=0,
            index=at,
        )

    @staticmethod
    def entry(at: int, about: str, count: int) -> dict[str, Any]:
        op, _, state = about.partition(" ")
        return {
            "process_group": ["other" if "other" in state else "dp", ""],
            "is_p2p": "send" in op,
            "profiling_name": f"nccl2:{op}",
            "state": state.split()[0],
            "time_created_ns": time.time_ns() - (count - at + 2) * 10**9,
        }

    def look(self) -> str:
        """The states of the collectives after a look: done, open, or unknown."""
        self.queues.look(self.now)
        return " ".join(self.found.get(token.index, "unknown") for token in self.tokens)


DONE, OPEN = "all_reduce completed", "all_reduce scheduled"


@pytest.mark.parametrize(
    ("ops", "entries", "states"),
    [
        ("all_reduce all_reduce", [DONE, OPEN], "done open"),
        # a ring buffer that holds older ones, too, those of other groups, and messages
        (
            "all_gather all_reduce",
            [DONE, "_all_gather_base completed", "send 0->1 scheduled", f"{OPEN} other", OPEN],
            "done open",
        ),
        ("all_reduce barrier", [OPEN, "barrier completed"], "open done"),
        ("all_reduce all_reduce", [OPEN], "unknown open"),  # the other entry is overwritten
        ("all_reduce broadcast", [DONE, OPEN], "unknown unknown"),  # whose entries are these?
        ("all_reduce", [], "unknown"),
    ],
)
def test_the_entries_of_torchs_hooks_tell_what_completed(
    monkeypatch: pytest.MonkeyPatch, ops: str, entries: list[str], states: str
) -> None:
    assert Hooked(monkeypatch, ops, entries).look() == states


def test_a_call_that_the_backend_rejected_has_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays "scheduled" for ever, and must not be taken for that of the call before."""
    job = Hooked(monkeypatch, "all_reduce", [DONE, OPEN])
    rejected = job.token(job.channel, 1, "all_reduce", 1)
    job.queues.add_rejected(rejected)
    assert job.look() == "done" and rejected.index not in job.found
    assert job.queues.oldest() is None


def test_a_group_that_issues_now_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest entry may be that of a call that has not returned."""
    job = Hooked(monkeypatch, "barrier", ["barrier scheduled"])
    job.channel.busy = 77
    assert job.look() == "unknown"
    job.channel.busy = 0
    job.queues._asked_ns = 0
    assert job.look() == "open" and job.queues.oldest() is job.tokens[0]


def test_what_a_completion_hook_has_not_told_is_in_flight_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hook may come a second late, and marks what completed itself."""
    job = Hooked(monkeypatch, "all_reduce all_reduce all_reduce", [])
    first, second, third = job.tokens
    overwritten: list[int] = []
    job.queues._tracker.overwritten = lambda index: index in overwritten
    for token in job.tokens:
        token.hooked = SimpleNamespace(done_ns=0, progress_ns=third.since)
    first.hooked.done_ns = job.now
    third.since = job.now - 10**9
    assert job.look() == "unknown open unknown"
    assert job.queues.oldest() is second
    assert job.queues.waits_since(second) == second.hooked.progress_ns
    job.now += 10**10
    assert job.look() == "unknown open open"
    second.hooked.done_ns = job.now
    job.queues.look(job.now)
    assert job.queues.oldest() is third
    overwritten.append(third.index)
    job.queues.look(job.now)
    assert job.queues.oldest() is third  # the device waits there, although its record is gone
    third.hooked.done_ns = job.now
    job.queues.look(job.now)
    assert job.queues.oldest() is None


def test_with_blocking_wait_a_hook_that_was_not_called_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is called when the group issues its next op."""
    job = Hooked(monkeypatch, "all_reduce all_reduce", [DONE, OPEN])
    job.channel.backend.watches = False
    assert job.look() == "done unknown" and job.queues.oldest() is None
    job = Hooked(monkeypatch, "all_reduce", [])
    job.channel.backend.watches = False
    job.queues._tracker.overwritten = lambda _: False
    job.tokens[0].hooked = SimpleNamespace(done_ns=0, progress_ns=0)
    assert job.look() == "unknown" and job.queues.oldest() is None


def test_the_collective_in_which_a_device_waits_may_be_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's recorder still has its entry."""
    job = Hooked(monkeypatch, "all_reduce all_reduce all_reduce", [DONE, OPEN, OPEN])
    job.queues._tracker.writer.capacity = 2
    assert job.look() == "unknown open open"
    assert job.queues.oldest() is job.tokens[1]  # the overwritten one is complete
    job = Hooked(monkeypatch, "all_reduce all_reduce all_reduce", [DONE, OPEN, OPEN])
    job.queues._tracker.writer.capacity = 1
    job.look()
    assert job.queues.oldest() is job.tokens[1]


def test_the_oldest_of_more_messages_than_one_look_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_queues, "_MESSAGES_AT_ONCE", 2)
    job = Hooked(monkeypatch, "send send send", [])
    for token in job.tokens:
        token.result = lambda: None
    for _ in range(4):
        job.look()
        assert job.queues.oldest() is job.tokens[0]


def test_an_op_whose_entry_may_be_overwritten_is_no_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = queues_with_one_in_flight(monkeypatch)
    (first,) = queues._added
    second: Any = SimpleNamespace(**{**vars(first), "index": 2, "backend_number": 2})
    queues.add(second)
    active = frozenset({1, 2})
    monkeypatch.setattr(torch_progress, "capacity", lambda: 20)
    monkeypatch.setattr(
        torch_progress,
        "in_flight",
        lambda: {"0": torch_progress.InFlight(active, frozenset(), active)},
    )
    queues.look(NOW_NS + 3 * 10**9)
    assert queues.oldest() is first
    # Another group issues ops, whose entries take the place of the first one's.
    queues._tracker.writer.last_index = 11
    active = frozenset({2})
    queues.look(NOW_NS + 60 * 10**9)
    assert queues.oldest() is second
    assert queues.waits_since(second) == second.since
    # The second one is active, and its own entry is recent enough: once it is gone, it is done.
    active = frozenset()
    queues.look(NOW_NS + 90 * 10**9)
    assert queues.oldest() is None
    assert queues.waits_since(second) == NOW_NS + 90 * 10**9
