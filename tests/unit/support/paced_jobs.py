"""Simulated jobs whose ranks compute for known times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from builders import DISPATCHER, MS, SCRIPT, START, S

from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    LearnedHow,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import Observation, RankLog

Compute = Callable[[int, int], float]
"""(rank, step) to milliseconds of own work before the step's first collective."""


def job(
    ranks: int,
    steps: int,
    compute: Compute,
    *,
    how: str = "wait",
    device: str = "cpu",
    timed: bool = True,
) -> list[RankLog]:
    """A job that issues two all_reduces a step: the first after ``compute``, the second 2 ms later.

    Args:
        how: "wait": each is waited for; "cpp": C++ waits for both at the end of the step;
            "unseen": it does so where nobody records it.
        device: on an accelerator, the host never waits.
        timed: durations on the device are known.
    """
    group = ProcessGroup("0", tuple(range(ranks)), "default_pg", "gloo", incarnation=1)
    logs = [
        RankLog(rank=rank, world_size=ranks, host="node", pid=100 + rank) for rank in range(ranks)
    ]
    channel = Channel(group, device, runs_ahead=device != "cpu")
    asked = CollectiveArgs("all_reduce", DISPATCHER["all_reduce"])
    now = [START] * ranks
    for step in range(steps):
        for line, work in ((10, None), (20, 2.0)):
            arrived = [
                now[rank] + int(MS * (compute(rank, step) if work is None else work))
                for rank in range(ranks)
            ]
            end = max(arrived) + MS // 2
            stack = (Frame(SCRIPT, line, "train"),)
            for rank, log in enumerate(logs):
                op = Collective(
                    len(log.collectives) + 1,
                    channel,
                    len(log.collectives) + 1,
                    asked,
                    State.COMPLETED,
                    arrived[rank],
                    step=step,
                    stack=stack,
                    returned_ns=arrived[rank] + 1000,
                )
                if device != "cpu":
                    op.duration_ns = end - arrived[rank] if timed else None
                elif how == "wait":
                    op.wait_began_ns, op.wait_ended_ns, op.learned_how = (
                        arrived[rank] + 2000,
                        end,
                        LearnedHow.WAIT,
                    )
                else:
                    op.learned_how = LearnedHow.POLL
                if how == "cpp" and line == 20:
                    for each in (log.collectives[-1], op):
                        each.wait_began_ns, each.wait_ended_ns = arrived[rank] + 2000, end
                log.collectives.append(op)
                now[rank] = end if how == "wait" or line == 20 else arrived[rank]
    for rank, log in enumerate(logs):
        log.captured_ns, log.steps = max(now), steps
        log.observation = Observation(seen_ns=max(now))
        assert rank == log.rank
    return logs


def ten_seconds_apart(ops: Sequence[Collective], took_s: Sequence[float]) -> list[Collective]:
    """The same collectives after the first step, one every ten seconds, each of which took its
    time.
    """
    return [
        msgspec.structs.replace(
            op,
            index=number,
            announced_ns=number * 10 * S,
            done_ns=number * 10 * S + int(took * S),
            step=1,
        )
        for number, (op, took) in enumerate(zip(ops, took_s, strict=True), 1)
    ]
