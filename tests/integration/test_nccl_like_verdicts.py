"""Verdicts where the host runs ahead of the device, as with NCCL: on the test backend that behaves
so.

A synchronous call returns at once and returns no Work, so a hung job stands in ``.item()`` or any
other line after the collective.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chosen import long
from harness import Harness, JobResult
from more_scenarios import find

from commlens.commands.demo import differences
from commlens.config import Settings
from commlens.model.collective import LearnedHow, State

HERE = Path(__file__).parent
PROGRAM = HERE / "nccl_like_faults.py"
sys.path.append(str(HERE.parent))

import nccl_like  # noqa: E402

pytestmark = pytest.mark.timeout(240)  # the first test compiles the backend
STALL_TIMEOUT_S = 4.0  # a rank asks torch's recorder two seconds after a group has fallen quiet

Run = Callable[..., JobResult]


@pytest.fixture(params=["nccl", "nccl2", "nccl2-native"])
def nccl(request: pytest.FixtureRequest) -> str:
    """The emulated engine: ProcessGroupNCCL, or that of torch 2.15, of which only commlens's native
    engine learns all.
    """
    if why_not := nccl_like.why_not(request.param.partition("-")[0]):
        pytest.skip(why_not)
    return str(request.param)


@pytest.fixture
def run(jobs: Harness, tmp_path: Path, nccl: str, native_cache: Path) -> Run:
    """Runs a scenario, or a program of nccl_like_faults.py, on the backend."""
    kind, _, engine = nccl.partition("-")
    common = {**nccl_like.variables(kind), "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"}
    if engine:
        common |= {"COMMLENS_NATIVE_DIR": str(native_cache)}

    def run(
        name: str,
        *,
        program: bool = True,
        stall_s: float | str = STALL_TIMEOUT_S,
        goes_on: bool = False,
        environ: dict[str, str] | None = None,
        **settings: Any,
    ) -> JobResult:
        if engine:
            settings = {"engine": engine, **settings}
        result = jobs.run_job(
            find("healthy-plain" if program else name),
            3 if program else 4,
            tmp_path,
            settings=Settings(stall_timeout=stall_s, **settings),
            environment={**common, **(environ or {})},
            arguments=[str(PROGRAM), name] if program else (),
            timeout_s=3 * float(stall_s) if goes_on else 50,
        )
        print(result)  # pytest shows it when the test fails
        assert result.timed_out == goes_on
        return result

    return run


SCENARIOS = [
    "holds-gil",
    "dies-exception",
    "swap-three-groups",
    "pipeline-lost-send",
    "ddp-skip-backward",
    "mismatch-root",
]
"""One of each way of reasoning; benchmarks/soak.py runs random jobs on the backend."""


@pytest.mark.parametrize(
    "name",
    [long(name, when=name != "swap-three-groups") for name in SCENARIOS],
)
def test_scenarios_get_the_verdict_that_they_get_on_gloo(run: Run, nccl: str, name: str) -> None:
    if reason := find(name).impossible():
        pytest.skip(reason)
    if (nccl, name) == ("nccl2", "pipeline-lost-send"):
        pytest.skip("the Python engine does not learn which messages of nccl2 are complete")
    result = run(name, program=False, stall_s=2.0)
    assert differences(result.verdict, find(name).truth(4)) == []
    assert not result.boxes_left


@pytest.mark.long
def test_ranks_whose_devices_wait_for_each_other_are_told_before_the_stall_timeout(
    run: Run,
) -> None:
    name = "swap-three-groups"
    result = run(name, program=False, stall_s="auto")
    assert differences(result.verdict, find(name).truth(4)) == []
    waits = [op for log in result.logs() for op in log.collectives if op.in_flight]
    [told, *_] = [at for at, what in result.said if not isinstance(what, str)]
    assert told - min(op.announced_ns for op in waits) / 1e9 < 20


@pytest.mark.parametrize("name", ["healthy-fsdp2", long("healthy-p2p")])
def test_nothing_is_said_of_a_healthy_job(run: Run, name: str) -> None:
    if reason := find(name).impossible():
        pytest.skip(reason)
    result = run(name, program=False)
    assert result.said == []
    assert set(result.exits.values()) == {0}


@pytest.mark.parametrize("engine", [long("python"), "auto"])
def test_the_collective_that_a_rank_left_out_300_calls_ago(run: Run, engine: str) -> None:
    verdict = run("skipped", engine=engine).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.why, verdict.culprits) == ("mismatch/op", "skipped", [1])


@pytest.mark.parametrize("engine", [long("python"), "auto"])
def test_a_late_rank_and_both_lines_of_the_others(run: Run, engine: str) -> None:
    """The line of the collective, and the line at which the host stands."""
    result = run("asleep", engine=engine)
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0, 2])
    assert verdict.collective is not None and verdict.collective.sequence_number == 21
    assert verdict.source == f"{PROGRAM.name}:{line_of('time.sleep(600)')}"
    assert f"{PROGRAM.name}:{line_of('dist.all_reduce(x)')}" in verdict.explanation
    hosts = line_of("x.sum().item()", after="def asleep")
    assert (
        f"The hosts of ranks 0,2 ran ahead and stand at {PROGRAM.name}:{hosts}"
        in verdict.explanation
    )
    states = {
        log.rank: [(op.state, op.learned_how) for op in log.collectives] for log in result.logs()
    }
    assert states[1] == [(State.COMPLETED, LearnedHow.NATIVE_RECORDER)] * 20
    for rank in (0, 2):
        in_flight = [(State.ISSUED, LearnedHow.NATIVE_RECORDER)] * 50
        assert states[rank] == [*states[1], *in_flight], "None has completed by returning."


def test_a_host_that_ran_ahead_further_than_the_ring_buffer_holds(run: Run) -> None:
    result = run("asleep", box_entries=40)
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0, 2])
    assert any(
        "ranks 0,2: the collective in which their devices wait is overwritten" in note.lower()
        for note in verdict.missing_evidence
    )


@pytest.mark.long  # test_scenarios.py reads it from a dump as NCCL's
def test_sizes_that_differ(run: Run) -> None:
    verdict = run("other_size").verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == ("mismatch/shape", [1])


@pytest.mark.long  # swap-three-groups is such a cycle, too
def test_two_groups_in_another_order(run: Run) -> None:
    verdict = run("other_order").verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == ("cycle", [1])


@pytest.mark.parametrize(("timing", "culprits"), [("1", [1]), long("0", [])])
def test_a_kernel_that_never_ends_is_told_from_a_collective_that_does_not(
    run: Run, nccl: str, timing: str, culprits: list[int]
) -> None:
    """With timing, torch's recorder knows what the device has started; that of nccl2 never does."""
    if nccl != "nccl":
        culprits = []
    verdict = run("endless_kernel", environ={"TORCH_NCCL_ENABLE_TIMING": timing}).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == ("stuck-inside", culprits)
    assert ("its device has not started it" in verdict.summary) == bool(culprits)


@pytest.mark.parametrize(("name", "number"), [long("asleep", 21), ("late_replay", 21)])
def test_where_torch_does_not_tell_how_far_the_device_is_the_verdict_says_so(
    run: Run, nccl: str, name: str, number: int
) -> None:
    """torch's recorder is off, or the collectives are in a CUDA graph. The rank that issued fewer
    is late, and still nothing is sure.
    """
    if (nccl, name) == ("nccl2-native", "asleep"):
        pytest.skip("a completion hook of commlens tells, without torch's recorder")
    verdict = run(
        name, goes_on=True, environ={"TORCH_FR_BUFFER_SIZE": "0" if name == "asleep" else "2000"}
    ).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.confidence, verdict.certain) == (
        "missing",
        [1],
        "low",
        False,
    )
    assert verdict.collective is not None and verdict.collective.sequence_number == number
    text = str(verdict.findings[0].would_raise_confidence)
    assert "torch's own recorder" in text and "in a CUDA graph" in text


def test_a_rank_that_is_not_in_a_new_group_and_does_not_come_to_it(run: Run, nccl: str) -> None:
    """nccl2 splits the communicator of the default group, where all its ranks meet."""
    if nccl == "nccl":
        pytest.skip("only the members meet there")
    verdict = run("skips_new_group").verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0, 2])


def test_blocking_wait(run: Run) -> None:
    """Then torch's watchdog does not see the collectives."""
    verdict = run("asleep", goes_on=True, environ={"TORCH_NCCL_BLOCKING_WAIT": "1"}).verdict
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("missing", [1], "low")


def test_the_verdict_comes_before_torch_aborts_the_job(run: Run) -> None:
    result = run("asleep", stall_s=60.0, environ={"GROUP_TIMEOUT_S": "16"})
    first = result.verdicts[0]
    assert (first.kind, first.culprits) == ("missing", [1])
    assert any("timeout of 16 s is about to expire" in line for line in result.lines)
    assert all(verdict.culprits == [1] for verdict in result.verdicts)


def test_a_rank_that_torch_aborts_is_a_victim(run: Run) -> None:
    """Without a verdict before: the abort at the group's timeout is a consequence."""
    result = run("asleep", stall_s=60.0, environ={"GROUP_TIMEOUT_S": "8"}, dump_on_timeout=False)
    assert -signal.SIGABRT in result.exits.values()
    assert [verdict.culprits for verdict in result.verdicts] in ([[1]], [[1], [1]])
    assert result.verdicts[0].kind == "missing"


def line_of(text: str, after: str = "") -> int:
    lines = PROGRAM.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(after))
    return next(number for number, line in enumerate(lines, 1) if number > start and text in line)
