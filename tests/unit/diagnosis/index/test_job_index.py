"""How far a rank has come, as its records show it."""

from __future__ import annotations

import msgspec
from builders import Job, Stay, at, training
from judging import blame, judge

from commlens.model.collective import State

SLEEP = Stay(57, "load_batch")


def test_after_calls_without_a_number_a_rank_may_have_come() -> None:
    """A rank catches an error of its library, and goes on: nothing numbers its later calls."""
    logs = Job(4).run(training(at(2, 7, SLEEP))).logs()
    for log in logs:
        log.collectives = [
            msgspec.structs.replace(
                op, channel=msgspec.structs.replace(op.channel, device="deep_ep", runs_ahead=True)
            )
            for op in log.collectives
        ]
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")
    newest = logs[2].collectives[-1]
    again = msgspec.structs.replace(newest, index=newest.index + 1, sequence_number=0)
    logs[2].collectives = [*logs[2].collectives, again]
    assert judge(logs).culprits == []
    failed = msgspec.structs.replace(
        logs[0].collectives[-1],
        index=newest.index + 1,
        state=State.FAILED,
        error="AssertionError: x must have two dimensions",
        returned_ns=newest.returned_ns,
    )
    again = msgspec.structs.replace(again, index=newest.index + 2)
    logs[2].collectives = [*logs[2].collectives[:-1], failed, again]
    assert judge(logs).culprits == []
