"""Tests of src/commlens/tracing/attribution/module_calls.py, where threads meet."""

from __future__ import annotations

import bisect
from types import SimpleNamespace
from typing import Any

import pytest

from commlens.tracing.attribution import module_calls
from commlens.tracing.attribution.module_calls import CallTable, ModuleCall


def call(start: int, end: int) -> ModuleCall:
    row: Any = None
    return ModuleCall(row, 1, None, None, start, wrapper=False, end=end)


@pytest.mark.parametrize("number", [12, 22, 32])
def test_a_step_may_end_on_another_thread_while_a_node_is_looked_up(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, kept = CallTable(), call(30, 40)
    table.add(call(10, 20))
    table.add(call(20, 30))
    table.step_ended()
    table.add(kept)
    pending = [table.step_ended]

    def interrupted(*arguments: Any, **named: Any) -> int:
        at = bisect.bisect_right(*arguments, **named)
        while pending:
            pending.pop()()
        return at

    monkeypatch.setattr(module_calls, "bisect", SimpleNamespace(bisect_right=interrupted))
    assert table.find(number) is (kept if number == 32 else None)
    assert table.calls == [kept]
