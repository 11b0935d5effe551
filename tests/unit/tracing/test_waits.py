"""Which event a wait belongs to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commlens.tap import torch_patches
from commlens.tracing.raw_event import RawEvent
from commlens.tracing.waits import Waits


class Work:
    pass


def event() -> RawEvent:
    made = RawEvent()
    made.wait_began_ns = made.wait_ended_ns = 0
    return made


def test_old_works_are_dropped_and_their_waits_still_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_patches, "work_is_completed", lambda work: False)
    waits, works = Waits(), [Work() for _ in range(30)]
    events = [event() for _ in works]
    for each, work in zip(events, works, strict=True):
        waits.expect_of_work(each, work)
    assert len(waits._of_works) <= 17
    for each, work in zip(events, works, strict=True):
        assert waits.wait_begins(work) is each
        waits.wait_ended(each, None)
        assert 0 < each.wait_began_ns <= each.wait_ended_ns
    assert waits.wait_begins(works[0]) is None


def test_a_call_that_waits_itself_takes_the_next_wait_of_its_thread() -> None:
    waits, mine, other, work = Waits(), event(), event(), Work()
    waits.expect_of_work(other, work)
    waits.expect_of_thread(mine)
    assert waits.wait_begins(work) is mine
    assert waits.wait_begins(work) is other


def test_a_refused_collective_has_no_wait() -> None:
    waits, refused, later, output = Waits(), event(), event(), torch.ones(4)
    waits.expect_of_outputs(refused, [output.data_ptr()])
    waits.forget(refused)
    assert waits.tensor_wait_begins(output) is None
    waits.expect_of_outputs(later, [output.data_ptr()])
    without_address: Any = object()
    assert waits.tensor_wait_begins(without_address) is None
    assert waits.tensor_wait_begins(output) is later
