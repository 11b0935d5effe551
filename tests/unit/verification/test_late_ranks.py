"""For how long a rank may be late."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commlens.processes.process import CoreTimes
from commlens.verification import ready_clock
from commlens.verification.late_ranks import LateRanks

S = 1_000_000_000


@pytest.mark.parametrize(
    ("waited_s", "without_core_s", "is_refused"),
    [
        pytest.param(1.9, 0.0, False, id="in time"),
        pytest.param(2.1, 0.0, True, id="late"),
        pytest.param(3.9, 2.0, False, id="it had no core for half of the time"),
        pytest.param(4.1, 2.0, True, id="late in spite of the time without a core"),
        pytest.param(7.9, 7.9, False, id="it never had a core"),
        pytest.param(8.1, 8.1, True, id="no wait is endless"),
    ],
)
def test_time_in_which_a_late_rank_had_no_core_does_not_count(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, without_core_s: float, is_refused: bool
) -> None:

    def waits_of(pid: int) -> dict[int, CoreTimes]:
        waits = core_waits_ns[pid].items()
        return {thread: CoreTimes(wait_ns, 0, False, 0) for thread, wait_ns in waits}

    core_waits_ns = {11: {11: 7 * S, 12: 0}, 13: {13: 0}}  # by process and thread, since its start
    monkeypatch.setattr(ready_clock.process, "core_times", waits_of)
    peers: Any = SimpleNamespace(
        how_it_ended=lambda _: "",
        any_doubtful=lambda _: False,
        give_up_without_relay=lambda _: None,
        pids_here=lambda ranks: [10 + rank for rank in ranks],
    )
    nothing: Any = None
    late = LateRanks(Path(), nothing, nothing, peers, nothing, nothing, lambda: 2.0)
    refused: list[list[int]] = []
    monkeypatch.setattr(late, "_refuse_if_in_cycle", lambda *_: None)
    monkeypatch.setattr(late, "_refuse_missing", lambda _, absent, __: refused.append(absent))
    for number in (1, 2):  # each collective counts anew
        pending: Any = SimpleNamespace(channel=SimpleNamespace(key=5), number=number)
        late.refuse_if_hopeless(pending, [1, 3], int(0.05 * S))
        core_waits_ns[11][12] += int(without_core_s * S)  # its main thread waits for this one
        late.refuse_if_hopeless(pending, [1, 3], int(waited_s * S))
        assert refused == number * [[1, 3]] * is_refused
