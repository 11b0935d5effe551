"""A collective that all ranks have entered, and that does not complete."""

from __future__ import annotations

import msgspec
import pytest
from builders import Job, training
from goldens import hold
from judging import judge

from commlens.model.collective import Channel, LearnedHow, State
from commlens.model.ranklog import End, Observation, RankLog


def stuck_inside() -> list[RankLog]:
    logs = Job(4).run(training(lambda *_: None)).logs()
    for log in logs:
        del log.collectives[11:]
        log.issued = 11
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        log.closed = False
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    return logs


def test_all_arrived_and_nobody_completes() -> None:
    verdict = judge(stuck_inside())
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("stuck-inside", [], [0, 1, 2, 3])
    hold("stuck-inside/no-progress", verdict)


def test_stopped_inside() -> None:
    logs = stuck_inside()
    logs[1].observation = Observation(End.RUNNING, window_s=5, proc_state="T", stopped_fraction=1.0)
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("stuck-inside", "stopped", [1])
    hold("stuck-inside/stopped", verdict)


@pytest.mark.parametrize("completion", ["status", "hooks", "unknown"])
def test_why_completion_is_unknown_depends_on_the_backend(completion: str) -> None:
    """Advice that does not help with a backend is not given."""
    logs = stuck_inside()
    for log in logs:
        for op in log.collectives:
            group = msgspec.structs.replace(op.channel.group, backend="xyz")
            op.channel = Channel(group, "cuda", runs_ahead=True, completion=completion)
        last = log.collectives[-1]
        last.state, last.learned_how = State.UNKNOWN, LearnedHow.UNKNOWN
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("waiting", [], "low")
    hold(f"stuck-inside/completion-{completion}", verdict)
