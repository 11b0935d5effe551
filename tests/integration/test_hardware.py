"""What the hardware did, and why real jobs on gloo stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from chosen import long
from emulated_nodes import launch, nodes, wait
from harness import Harness, JobResult
from incidents import CAUSES, NO_CAUSES, PER_NODE, RANKS, Incident, tell
from node_files import NodeFiles
from test_slow_rank import TRAIN, look_often

from commlens.config import Settings
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.cause import Hardware
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.scenarios import find

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

PROGRAM = Path(__file__).parent / "broken_hardware.py"
QUICK = {"two nodes on one leaf cut", "RAS contradicts", "another job's GPU lost"}
KINDS = {"stuck": "stuck-inside", "missing": "missing", "dead": "dead"}


def run(jobs: Harness, ranks: int, folder: Path, *arguments: str, settings: Settings) -> JobResult:
    result = jobs.run_job(
        find("healthy-plain"),
        ranks,
        folder,
        settings=settings,
        arguments=[str(PROGRAM), *arguments],
    )
    print(result)  # pytest shows it when the test fails
    return result


@pytest.fixture(scope="module")
def dumps(
    jobs: Harness, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[RankLog]]:
    """The records of one job for each way to stop, run when they are first asked for."""
    made: dict[str, bytes] = {}

    def dump(how: str) -> list[RankLog]:
        if how not in made:
            folder = tmp_path_factory.mktemp(how)
            settings = Settings(stall_timeout=2.0, health="off")
            result = run(jobs, RANKS, folder, how, settings=settings)
            assert result.verdict is not None and result.verdict.kind == KINDS[how]
            made[how] = msgspec.msgpack.encode(result.logs())
        return msgspec.msgpack.decode(made[how], type=list[RankLog])

    return dump


def stopped_ns(how: str, logs: list[RankLog]) -> int:
    last = [log.collectives[-1] for log in logs if log.collectives[-1].in_flight]
    if how == "dead":
        return next(log.observation.ended_ns for log in logs if log.rank == 2)
    return (max if how == "stuck" else min)(op.announced_ns for op in last)


def verdict_on(incident: Incident, logs: list[RankLog], folder: Path) -> Verdict:
    for log in logs:
        log.host = f"n{log.rank // PER_NODE}"
        log.local_rank = log.rank % PER_NODE
    at_ns = stopped_ns(incident.kind, logs)
    tell(incident, logs, at_ns, max(at_ns, *(log.captured_ns for log in logs)) + 10**9, folder)
    return diagnose_logs(logs)


def explaining(verdict: Verdict) -> list[Hardware]:
    return [each for each in verdict.cause.hardware if each.explains] if verdict.cause else []


def rows(incidents: list[Incident]) -> list[object]:
    return [
        long(incident, when=incident.name not in QUICK, id=incident.name)
        for incident in incidents
        if incident.kind != "slow"
    ]


@pytest.mark.parametrize("incident", rows(CAUSES))
def test_the_cause_and_its_place_are_named(
    dumps: Callable[[str], list[RankLog]], incident: Incident, tmp_path: Path
) -> None:
    verdict = verdict_on(incident, dumps(incident.kind), tmp_path)
    found = explaining(verdict)
    assert verdict.kind == KINDS[incident.kind]
    assert {each.event.fault for each in found} == {incident.fault}
    assert sorted({each.node for each in found}) == [f"n{node}" for node in incident.nodes]
    assert found[0].ranks == list(incident.ranks)
    if incident.kind == "stuck":
        assert (verdict.why, verdict.culprits) == (incident.fault, list(incident.blamed or []))
    assert verdict.cause is not None
    assert (verdict.cause.ras.says if verdict.cause.ras else "") == incident.ras_says


@pytest.mark.parametrize("incident", rows(NO_CAUSES))
def test_what_is_not_the_cause_is_not_blamed(
    dumps: Callable[[str], list[RankLog]], incident: Incident, tmp_path: Path
) -> None:
    without = diagnose_logs(dumps(incident.kind))
    verdict = verdict_on(incident, dumps(incident.kind), tmp_path)
    assert not explaining(verdict)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.summary) == (
        without.kind,
        without.why,
        without.culprits,
        without.summary,
    )


def test_the_watcher_tells_what_the_kernel_logs_while_the_job_stops(
    jobs: Harness, tmp_path: Path
) -> None:
    files = NodeFiles(tmp_path / "node", gpus=4)
    message = "NVRM: Xid (PCI:0000:11:00): 79, pid='<unknown>', name=<unknown>, off the bus"
    result = run(
        jobs,
        4,
        tmp_path / "job",
        "stuck",
        str(files.root / "kern.log"),
        message,
        settings=Settings(stall_timeout=2.0, health=str(files.root)),
    )
    verdict = result.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.why, verdict.culprits) == ("stuck-inside", "gpu-fault", [1])
    assert "GPU 0000:11:00.0 reported Xid 79" in verdict.summary
    # a dump tells the same later
    again = diagnose_logs(result.logs())
    assert (again.why, again.culprits, again.summary) == (
        verdict.why,
        verdict.culprits,
        verdict.summary,
    )


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_node_that_reports_hears_what_the_other_node_saw(tmp_path: Path) -> None:
    with nodes(2, tmp_path, subnet=97) as two:
        if not two[0].isolated:
            pytest.skip("no network namespaces here: both nodes would have one name")
        files = [NodeFiles(node.folder / "host", gpus=2) for node in two]
        log = str(files[1].root / "kern.log")
        message = "bnxt_en 0000:90:00.0 eth0: NIC Link is Down"
        launch(
            two,
            [str(PROGRAM), "stuck", log, message],
            COMMLENS_STALL_TIMEOUT="3",
            COMMLENS_ABORT_ON="stall",
            COMMLENS_HEALTH="host",  # below the working directory of each node
        )
        wait(two, 150)
        said = " ".join(two[0].output.split())
    assert "are inside all_reduce" in said and "on node1, eth0 went down" in said, said
    assert "look at eth0 on node1" in said


HEAT = """
def heat(table):
    from pathlib import Path

    rows = Path(table).read_text().splitlines()
    rows[2] = rows[2].replace("0x0000000000000000", "0x0000000000000040")
    Path(table).write_text("".join(f"{row}\\n" for row in rows))

"""


@pytest.mark.long
def test_heat_is_named_as_the_reason_of_a_slow_rank(
    jobs: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    files = NodeFiles(tmp_path / "node", gpus=3)
    table = str(files.root / "nvidia-smi.csv")
    loop = "    for _ in range(250):\n"
    assert loop in TRAIN
    hot = f"    for step in range(250):\n        if step == dist.get_rank() * 50 == 50:\n            heat({table!r})\n"
    program = HEAT + TRAIN.replace(loop, hot)
    result = jobs.run_program(program, 3, tmp_path, settings=Settings(health=str(files.root)))
    assert set(result.exits.values()) == {0}, result
    said = " ".join(" ".join(result.lines).split())
    assert "Rank 1 makes the job slow" in said, result
    assert "GPU 0000:11:00.0 lowered its clock because of heat or power" in said, said
    assert "look at the cooling and the power of" in said.lower()
