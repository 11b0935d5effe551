"""The events of a long program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlens.tracing import event_log
from commlens.tracing.event_log import EventLog
from commlens.tracing.raw_event import RawEvent

ARGS: Any = SimpleNamespace()
INFO: Any = SimpleNamespace(index=0)


def issue(log: EventLog, step: int) -> RawEvent:
    event: Any = RawEvent()
    event.args, event.info, event.step = ARGS, INFO, step
    event.reduce_op = event.path = event.phase = event.owner = event.cause = None
    event.functional = event.microbatch = None
    log.add(event)
    return event


def test_a_step_is_summarised_when_it_has_ended() -> None:
    log = EventLog(whole_until=1)
    for step in range(4):
        issue(log, step)
        log.summarise(step, setup_until=0)
    assert [event.step for event in log.events] == [0, 3]
    (summary,) = log.summaries.values()
    assert (summary.first.step, summary.last_step, summary.count) == (1, 2, 2)


def test_the_setup_has_summaries_of_its_own() -> None:
    log = EventLog(whole_until=0)
    for _ in range(3):
        issue(log, 0)
    log.summarise(1, setup_until=2)
    assert [summary.count for summary in log.summaries.values()] == [2, 1]


def test_without_steps_all_but_the_first_and_the_newest_events_are_summarised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_log, "WHOLE_EVENTS", 100)
    monkeypatch.setattr(event_log, "_SUMMARISE_AT", 20)
    log = EventLog(whole_until=10)
    for _ in range(1_000):
        log.tidy(issue(log, 0), 0, 0)
    assert [event.sequence for event in log.events[:100]] == list(range(1, 101))
    assert len(log.events) < 130 and log.last == 1_000
    (summary,) = log.summaries.values()
    assert summary.count + len(log.events) == 1_000


def test_an_event_of_another_thread_is_kept_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread issues one, and summarises, too, while this one ends doing so."""
    log = EventLog(whole_until=0)
    for _ in range(3):
        issue(log, 0)
    count_one = EventLog._summarise
    append = log.events.append

    def interrupted(log: EventLog, event: RawEvent, *, in_setup: bool) -> None:
        count_one(log, event, in_setup=in_setup)
        if event.sequence == 3:
            late: Any = RawEvent()
            late.step, late.sequence = 1, 4
            append(late)  # of the list that it saw
            log.summarise(1, setup_until=0)

    monkeypatch.setattr(EventLog, "_summarise", interrupted)
    log.summarise(1, setup_until=0)
    assert [event.sequence for event in log.events] == [4]
    assert [summary.count for summary in log.summaries.values()] == [3]
