"""Every scenario gets its verdict: the kind, the reason, the true culprits and nobody else, the
collective, the culprit's own line.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from _diagnosing import commlens, grade
from chosen import long
from dumpgen import converted
from harness import STALL_TIMEOUT_S, Harness, JobResult
from more_scenarios import SCENARIOS, find

from commlens.commands.demo import differences
from commlens.config import Settings
from commlens.model.ranklog import RankLog
from commlens.scenarios import Ending

FAULTY = [scenario for scenario in SCENARIOS if scenario.fault]
CALM = [scenario for scenario in SCENARIOS if not scenario.fault and not scenario.waits]
PATIENT = [scenario for scenario in SCENARIOS if scenario.waits]

# With two ranks there is no majority, and with eight more can be confused: not everything again,
# but each way of reasoning.
SMALL = [s.name for s in FAULTY if 2 in s.worlds and s.name != "throttled"]
LARGE = [
    "data-loader",
    "mesh-cascade",
    "dies-sigkill",
    "skip-then-other",
    "swap-two-groups",
    "swap-three-groups",
    "pipeline-lost-send",
    "mismatch-root",
    "fsdp2-forward-order",
    "batched-p2p-missing",
    "ddp-skip-backward",
    "uneven-then-barrier",
]
ALIKE = {
    "dies-hard-exit",  # as dies-exit
    "dies-sigabrt",  # as dies-sigkill
    "mismatch-dtype",  # as mismatch-size
    "both-recv",  # as recv-without-send
    "uneven-then-idle",  # as uneven-then-barrier
}
"""What is diagnosed as another scenario is. Their causes have unit tests of their own."""
RUNS = [
    *(long(s.name, 4, when=s.name in ALIKE, id=f"{s.name}-4") for s in FAULTY),
    *(long(name, 2, id=f"{name}-2") for name in SMALL),
    *(long(name, 8, id=f"{name}-8") for name in LARGE),
]

NOT_IN_GLOO = {
    s.name for s in FAULTY if s.family in ("p2p", "pipeline") or s.ending is not Ending.HANGS
}
NOT_IN_GLOO |= {"stopped", "holds-gil", "throttled"}
"""Gloo's recorder sees no messages; a job that dies, and a thread that cannot run, leave nothing to
read.
"""


def stall_timeout_s(name: str) -> float:
    """Shorter for most jobs with a fault; healthy and patient ones have the harness's, which a busy
    machine must not reach.
    """
    return (
        STALL_TIMEOUT_S
        if find(name).fault is None or name in ("stopped", "holds-gil", "throttled")
        else 1.5
    )


SPEAKS_WITHIN_S = 2.0 if "PYTEST_XDIST_WORKER" not in os.environ else 10.0
"""After the stall timeout: 2 s, and more where other tests have the cores."""


def run(jobs: Harness, name: str, world_size: int, folder: Path, **options: object) -> JobResult:
    scenario = find(name)
    reason = scenario.impossible()
    if reason is not None:
        pytest.skip(reason)
    result = jobs.run_job(scenario, world_size, folder, **options)  # type: ignore[arg-type]
    print(result)  # pytest shows it when the test fails
    assert not result.timed_out
    return result


@dataclass
class Kept:
    """Of a job that has run: what other recorders make of it is looked at in a test of its own."""

    logs: list[RankLog]
    native: dict[int, bytes]  # what torch's own recorder of gloo had


KEPT: dict[str, Kept] = {}


def run_and_keep(jobs: Harness, name: str, world_size: int, folder: Path) -> JobResult:
    native = folder / "native"
    recorder = (
        {}
        if name in NOT_IN_GLOO
        else {"PYTEST_NATIVE_DUMPS": str(native), "TORCH_FR_BUFFER_SIZE": "2000"}
    )
    settings = Settings(stall_timeout=stall_timeout_s(name))
    result = run(
        jobs,
        name,
        world_size,
        folder,
        settings=settings,
        environment=recorder if world_size == 4 else {},
    )
    if world_size == 4:
        files = {rank: native / f"gloo_{rank}" for rank in range(world_size)}
        KEPT[name] = Kept(
            result.logs(),
            {rank: file.read_bytes() for rank, file in files.items() if file.exists()},
        )
    return result


def waiting_began(result: JobResult) -> float:
    """When the oldest wait of the dump began, Unix time."""
    ops = [op for log in result.logs() for op in (*log.collectives, *log.setups)]
    return min(op.announced_ns for op in ops if op.in_flight) / 1e9


def seconds_to_verdict(result: JobResult) -> float:
    at = next(at for at, what in result.said if not isinstance(what, str))
    return at - waiting_began(result)


def steps(result: JobResult) -> int:
    return sum(line.startswith("step ") for line in result.results())


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "world_size"), RUNS)
def test_verdict_is_the_truth(jobs: Harness, tmp_path: Path, name: str, world_size: int) -> None:
    scenario = find(name)
    result = run_and_keep(jobs, name, world_size, tmp_path)
    assert result.verdict is not None, "Nothing was said."
    assert differences(result.verdict, scenario.truth(world_size)) == []
    if scenario.ending is not Ending.ENDS:
        at_work = [
            rank
            for finding in result.verdict.findings
            if finding.kind == "waiting"
            for rank in finding.culprits
        ]
        others = [rank for rank in range(world_size) if rank not in result.verdict.culprits]
        assert result.verdict.victims == [rank for rank in others if rank not in at_work], (
            "A rank that is still at work waits for nobody."
        )
    assert steps(result) >= 6 or scenario.at_start, "The fault comes after six healthy steps."
    faults = [verdict for verdict in result.verdicts if verdict.is_fault]
    assert all(differences(verdict, scenario.truth(world_size)) == [] for verdict in faults), (
        "A wrong verdict came first."
    )
    if scenario.ending is Ending.HANGS:
        assert seconds_to_verdict(result) < stall_timeout_s(name) + SPEAKS_WITHIN_S
    assert not result.boxes_left
    assert result.dump is not None


# by recorders of collectives
RECORDED = [scenario for scenario in FAULTY if scenario.family != "startup"]
FORMS = [
    long(s.name, form, when=s.name in ALIKE, id=f"{s.name}-{form}")
    for s in RECORDED
    for form in ("nccl", "nccl-timing", "gloo")
    if form != "gloo" or s.name not in NOT_IN_GLOO
]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_dumps_of_other_recorders_get_the_same_verdict(
    jobs: Harness, tmp_path: Path, name: str, form: str
) -> None:
    """What NCCL's Flight Recorder would have left of the job, and what gloo's did leave (where it
    can).
    """
    if name not in KEPT:
        run_and_keep(jobs, name, 4, tmp_path / "job")
    dumps = tmp_path / "dumps"
    if form == "gloo":
        dumps.mkdir()
        for rank, data in KEPT[name].native.items():
            (dumps / f"rank_{rank}").write_bytes(data)
        if not KEPT[name].native:
            pytest.skip("This torch does not record gloo.")
    else:
        converted.write(
            KEPT[name].logs,
            dumps,
            timing=form == "nccl-timing",
            without=converted.without_dump(name, 4),
        )
    truth, answer = converted.truth_in_dumps(name, 4), commlens(dumps)
    assert grade(answer, truth) == "right", f"{answer}, the truth is {truth}"


def assert_nothing_wrong(result: JobResult) -> None:
    assert set(result.exits.values()) == {0}
    assert not [verdict for verdict in result.verdicts if verdict.is_fault]
    assert result.dump is None
    assert not result.boxes_left


CALM_USUAL = [(f"healthy-{kind}", 4) for kind in ("ddp", "fsdp2", "pipeline")]
CALM_RUNS = [
    long(s.name, w, when=(s.name, w) not in CALM_USUAL, id=f"{s.name}-{w}")
    for s in CALM
    for w in s.worlds
    if w == 4 or s.name in ("healthy-ddp", "healthy-pipeline", "healthy-p2p", "healthy-2d")
]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "world_size"), CALM_RUNS)
def test_healthy_jobs_are_left_alone(
    jobs: Harness, tmp_path: Path, name: str, world_size: int
) -> None:
    """No fault is ever printed, and what is computed is bit-identical to a run without commlens."""
    recorded = run(jobs, name, world_size, tmp_path / "recorded")
    assert_nothing_wrong(recorded)
    assert not recorded.said
    plain = run(jobs, name, world_size, tmp_path / "plain", recorded=False)
    assert set(plain.exits.values()) == {0}
    assert plain.results() == recorded.results()
    assert len(plain.results()) == 12 + world_size
    assert plain.outputs == recorded.outputs


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [long(s.name, when=s != PATIENT[0]) for s in PATIENT])
def test_waiting_is_not_stuck(jobs: Harness, tmp_path: Path, name: str) -> None:
    """The others wait for longer than the stall timeout: it may be said, but as no fault, although
    the job would be ended for one.
    """
    result = run(jobs, name, 4, tmp_path, timeout_s=100)
    assert_nothing_wrong(result)
    assert steps(result) == 12
