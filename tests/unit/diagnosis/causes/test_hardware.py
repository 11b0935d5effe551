"""Whether a change of hardware is why ranks stopped: incidents laid over simulated jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import builders
import pytest
from builders import Die, Job, Stay, all_reduce, training
from goldens import hold
from incidents import CAUSES, NO_CAUSES, PER_NODE, RANKS, Incident, tell

from commlens.diagnosis.causes.hardware import hardware_of_slow
from commlens.diagnosis.examine import diagnose_logs, straggler_verdict
from commlens.diagnosis.index.nodes import Node
from commlens.model.cause import Hardware
from commlens.model.collective import State
from commlens.model.health import HealthEvent, NodeHealth, RankPlace
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.speed.pace import SlowRanks

MISSING = DEAD = 2
SLOW = 1


def _stuck() -> tuple[list[RankLog], int]:
    logs = Job(RANKS).run(training(lambda *_: None)).logs()
    for log in logs:
        del log.collectives[11:]
        log.issued = 11
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        log.closed = False
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    return logs, max(log.collectives[-1].announced_ns for log in logs)


def _missing(at: str = "load_batch") -> tuple[list[RankLog], int]:
    def fault(job: Job, rank: int, step: int) -> Iterator[object] | None:
        if (rank, step) == (MISSING, 5):
            return iter([Stay(12, at)])
        return None

    logs = Job(RANKS).run(training(fault)).logs()
    waiting = [log.collectives[-1].announced_ns for log in logs if log.rank != MISSING]
    return logs, min(waiting)


def _dead(signal: str = "SIGABRT") -> tuple[list[RankLog], int]:
    def fault(job: Job, rank: int, step: int) -> Iterator[object] | None:
        if (rank, step) == (DEAD, 5):
            return iter([Die(Observation(End.KILLED, signal=signal), line=12)])
        return None

    logs = Job(RANKS).run(training(fault)).logs()
    return logs, logs[DEAD].observation.ended_ns


def _slow() -> tuple[list[RankLog], int]:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(12):
            yield all_reduce(job.world, 100, line=20)
            yield builders.Step()

    logs = Job(RANKS).run(program).logs()
    return logs, max(log.captured_ns for log in logs)


JOBS: dict[str, Callable[[], tuple[list[RankLog], int]]] = {
    "stuck": _stuck,
    "missing": _missing,
    "dead": _dead,
    "slow": _slow,
}


@pytest.fixture(autouse=True)
def _half_a_second_for_each_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builders, "MS", builders.S // 2)


def lay_over(logs: list[RankLog], incident: Incident, stalled_ns: int, folder: Path) -> None:
    for log in logs:
        log.host = f"n{log.rank // PER_NODE}"
        log.local_rank = log.rank % PER_NODE
    tell(incident, logs, stalled_ns, max(log.captured_ns for log in logs), folder)


def cause(name: str) -> Incident:
    return next(each for each in CAUSES if each.name == name)


def verdict_on(incident: Incident, folder: Path) -> Verdict:
    logs, stalled_ns = JOBS[incident.kind]()
    lay_over(logs, incident, stalled_ns, folder)
    if incident.kind == "slow":
        return slow_verdict(logs)
    return diagnose_logs(logs)


def slow_verdict(logs: list[RankLog]) -> Verdict:
    return straggler_verdict(SlowRanks([SLOW], 0.4, 12, 1.0, 0.0, 0.0), logs)


def explaining(verdict: Verdict) -> list[Hardware]:
    cause = verdict.cause
    return [each for each in cause.hardware if each.explains] if cause is not None else []


@pytest.mark.parametrize("incident", CAUSES, ids=lambda incident: incident.name)
def test_the_cause_and_its_place_are_named(incident: Incident, tmp_path: Path) -> None:
    verdict = verdict_on(incident, tmp_path)
    hold(f"hardware/{incident.name.lower().replace(' ', '-')}", verdict)
    hosts = [f"n{node}" for node in incident.nodes]
    if incident.kind == "slow":
        assert (verdict.why, verdict.culprits) == (incident.fault, incident.blamed)
        assert hosts[0] in verdict.explanation
        return
    found = explaining(verdict)
    assert {each.event.fault for each in found} == {incident.fault}
    assert sorted({each.node for each in found}) == hosts
    assert found[0].ranks == list(incident.ranks)
    if incident.kind == "stuck":
        assert (verdict.kind, verdict.why) == ("stuck-inside", incident.fault)
        assert verdict.culprits == list(incident.blamed or [])
        assert hosts[0] in verdict.summary and hosts[0] in verdict.next_step
    assert verdict.findings[0].evidence and hosts[0] in " ".join(verdict.findings[0].evidence)
    assert verdict.cause is not None
    assert (verdict.cause.ras.says if verdict.cause.ras else "") == incident.ras_says


@pytest.mark.parametrize("incident", NO_CAUSES, ids=lambda incident: incident.name)
def test_what_is_not_the_cause_is_not_blamed(incident: Incident, tmp_path: Path) -> None:
    verdict = verdict_on(incident, tmp_path / "with")
    without = verdict_on(Incident("nothing", incident.kind, lambda _: None), tmp_path / "without")
    assert not explaining(verdict)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.summary, verdict.next_step) == (
        without.kind,
        without.why,
        without.culprits,
        without.summary,
        without.next_step,
    )
    if verdict.cause is not None:
        assert bool(verdict.cause.hardware) == incident.coincides
        mentioned = " ".join(verdict.findings[0].evidence)
        assert ("may be a coincidence" in mentioned) == incident.coincides
        assert verdict.cause.ras is None


def test_storage_does_not_explain_what_a_rank_computes(tmp_path: Path) -> None:
    """The same as above, but the rank that does not arrive is in its own code."""
    logs, stalled_ns = _missing(at="compute_loss")
    lay_over(logs, cause("NFS gone"), stalled_ns, tmp_path)
    verdict = diagnose_logs(logs)
    assert verdict.why == "user-code" and verdict.cause is not None
    assert [each.explains for each in verdict.cause.hardware] == [False]


def test_a_rank_that_its_process_holds_back_is_not_slow_because_of_hardware(tmp_path: Path) -> None:
    logs, stalled_ns = _slow()
    lay_over(logs, cause("thermal throttle on one rank"), stalled_ns, tmp_path)
    logs[SLOW].observation = Observation(End.RUNNING, window_s=5, throttled_fraction=0.5)
    verdict = slow_verdict(logs)
    assert verdict.why == "throttled" and "heat or power" in verdict.explanation
    assert verdict.next_step.startswith("raise the CPU limit of its container")


def test_a_stopped_rank_is_not_stuck_because_of_hardware(tmp_path: Path) -> None:
    logs, stalled_ns = _stuck()
    logs[3].observation = Observation(End.RUNNING, proc_state="T", window_s=5, cpu_s=0.0)
    lay_over(logs, cause("Xid 48"), stalled_ns, tmp_path)
    verdict = diagnose_logs(logs)
    for log in logs:
        log.health = None
    without = diagnose_logs(logs)
    assert (verdict.why, verdict.culprits) == ("stopped", [3])
    assert (verdict.summary, verdict.next_step) == (without.summary, without.next_step)


@pytest.mark.parametrize(
    "line",
    [
        "EDAC MC1: 1 UE memory read error",
        "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 9",
    ],
)
@pytest.mark.parametrize(("signal", "explains"), [("SIGBUS", True), ("SIGABRT", False)])
def test_a_memory_error_explains_the_signal_that_the_kernel_sends_for_it(
    line: str, signal: str, explains: bool, tmp_path: Path
) -> None:
    logs, ended_ns = _dead(signal)
    incident = Incident("memory error", "dead", lambda scene: scene.log(1, line, before_s=1))
    lay_over(logs, incident, ended_ns, tmp_path)
    verdict = diagnose_logs(logs)
    assert verdict.culprits == [DEAD] and verdict.cause is not None
    assert [each.explains for each in verdict.cause.hardware] == [explains]
    assert verdict.action is not None
    assert (verdict.action.do == "exclude-node") == explains


@pytest.mark.parametrize(("pid", "explains"), [(1000 + DEAD, True), (77, False)])
def test_a_memory_error_of_another_process_explains_no_death(
    pid: int, explains: bool, tmp_path: Path
) -> None:
    logs, ended_ns = _dead("SIGBUS")
    assert logs[DEAD].pid == 1000 + DEAD
    line = f"Memory failure: 0x3f5c12: Sending SIGBUS to python:{pid} due to hardware memory corruption"
    incident = Incident("memory error", "dead", lambda scene: scene.log(1, line, before_s=1))
    lay_over(logs, incident, ended_ns, tmp_path)
    verdict = diagnose_logs(logs)
    assert verdict.culprits == [DEAD] and verdict.cause is not None
    assert [each.explains for each in verdict.cause.hardware] == [explains]


def test_a_place_is_unknown_where_the_driver_does_not_tell_the_gpus(tmp_path: Path) -> None:
    logs, stalled_ns = _stuck()
    lay_over(logs, cause("Xid 48"), stalled_ns, tmp_path)
    assert logs[0].health is not None
    logs[0].health.ranks = [RankPlace(0, 1000), RankPlace(1, 1001)]
    verdict = diagnose_logs(logs)
    assert (verdict.why, verdict.culprits) == ("in-collective", [])
    assert verdict.cause is not None
    assert {each.explains for each in verdict.cause.hardware} == {False}


@pytest.mark.parametrize(("reasons", "is_named"), [(64.0, True), (0.0, False)])
def test_an_old_change_slows_a_rank_only_while_it_lasts(reasons: float, is_named: bool) -> None:
    event = HealthEvent(
        what="gpu-throttled",
        fault="thermal",
        part="a",
        at_ns=builders.S,
        name="throttle_reasons",
        after=64.0,
    )
    health = NodeHealth(
        "n0",
        ranks=[RankPlace(0, 10, "a"), RankPlace(1, 11, "b")],
        events=[event],
        values={"gpu": {"a": {"throttle_reasons": reasons}}},
    )
    node = Node(health, {place.rank: place for place in health.ranks})
    named = hardware_of_slow([node], [0], 3600 * builders.S)
    assert [each.ranks for each in named] == [[0]] * is_named
