"""The hardware of a job that is only seen from outside: what is looked at, and what it explains."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from goldens import hold
from incidents import CAUSES, NO_CAUSES, PER_NODE, RANKS, Incident, S, tell
from node_files import NodeFiles, RasServer, communicator, gpu_address
from seen_ranks import call, sample, stay

from commlens.model.health import NodeHealth
from commlens.model.verdict import Verdict
from commlens.outside.find_ranks import FoundWorld
from commlens.outside.hardware import look_at_hardware
from commlens.outside.sample import HostSamples
from commlens.outside.verdict import judge
from commlens.processes import process
from commlens.processes.ranks import RankProcess

NOW_NS = 1_790_251_400 * S  # 2026-09-24 12:03:20 UTC

OVER = {"link down and up", "OOM of a neighbour"}
"""Causes that are over when the job is looked at: only their time speaks for them."""

UNSEEN = {
    "errors rising",
    "requests to a file server time out",
    "a data loader whose memory is swapped out",
}
"""Causes that only an earlier look would show."""

KINDS = {"stuck": "stuck-inside", "missing": "missing"}


def hosts_of(how: str) -> list[HostSamples]:
    """Eight ranks on four hosts: all in one call, or rank 2 in its data loader."""
    hosts = []
    for node in range(RANKS // PER_NODE):
        samples = [
            sample(
                rank,
                stay("load_batch", 57) if how == "missing" and rank == 2 else call("all_reduce", 8),
                world=RANKS,
            )
            for rank in range(node * PER_NODE, (node + 1) * PER_NODE)
        ]
        for one in samples:
            one.log.host = f"n{node}"
        hosts.append(HostSamples(f"n{node}", samples, RANKS, window_s=2.5))
    return hosts


def look_at(incident: Incident, folder: Path) -> Verdict:
    """Let an incident happen a second before the look, and judge the job."""
    hosts = hosts_of(incident.kind)
    logs = [one.log for host in hosts for one in host.samples]
    now_ns = NOW_NS
    healths = tell(incident, logs, now_ns - S, now_ns, folder, seen_late=True)
    for log in logs:
        log.health = None
    for host, health in zip(hosts, healths, strict=True):
        # the job began 600 s ago
        health.events = [event for event in health.events if event.at_ns > now_ns - 600 * S]
        host.health = health
    return judge(hosts)


def explaining(verdict: Verdict) -> list[tuple[str, str]]:
    hardware = verdict.cause.hardware if verdict.cause is not None else []
    return [(each.node, each.event.fault) for each in hardware if each.explains]


def named(incidents: Sequence[Incident]) -> list[object]:
    return [pytest.param(each, id=each.name) for each in incidents if each.kind in KINDS]


@pytest.mark.parametrize("incident", named(CAUSES))
def test_what_is_wrong_now_is_the_cause(incident: Incident, tmp_path: Path):
    verdict = look_at(incident, tmp_path)
    assert verdict.kind == KINDS[incident.kind]
    if incident.name in OVER | UNSEEN:
        assert not explaining(verdict) and verdict.cause is not None
        assert bool(verdict.cause.hardware) == (incident.name in OVER)
        return
    assert set(explaining(verdict)) == {(f"n{node}", incident.fault) for node in incident.nodes}
    if incident.kind == "stuck":
        assert verdict.why == incident.fault
        assert set(verdict.culprits) <= {*incident.ranks, *(incident.blamed or ())}
    ras = verdict.cause.ras if verdict.cause is not None else None
    assert (ras.says if ras is not None else "") == incident.ras_says


@pytest.mark.parametrize("incident", named(NO_CAUSES))
def test_what_is_not_wrong_now_is_not_the_cause(incident: Incident, tmp_path: Path):
    without = judge(hosts_of(incident.kind))
    verdict = look_at(incident, tmp_path)
    assert not explaining(verdict)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.summary) == (
        without.kind,
        without.why,
        without.culprits,
        without.summary,
    )


def test_the_words_of_a_lost_gpu(tmp_path: Path):
    incident = next(each for each in CAUSES if each.name == "Xid 79")
    verdict = look_at(incident, tmp_path)
    assert (verdict.culprits, verdict.confidence) == ([7], "medium")
    assert verdict.cause is not None
    assert {each.before for each in verdict.cause.hardware} == {"look"}
    hold("outside/lost-gpu", verdict)


def this_job(*expected: int) -> FoundWorld:
    stat = process.read_stat(os.getpid())
    assert stat is not None
    one = RankProcess(0, os.getpid(), stat.start_ticks, 2, 0, command="train.py")
    return FoundWorld([one], list(expected))


def look(root: Path, job: FoundWorld, meanwhile: object = None) -> NodeHealth:
    logs = [sample(0, call("all_reduce", 8)).log]
    logs[0].pid, logs[0].local_rank = os.getpid(), 0
    with look_at_hardware([job], root) as finish:
        if callable(meanwhile):
            meanwhile()
        return finish(logs)


def test_what_happened_before_the_job_is_left_out(tmp_path: Path):
    files = NodeFiles(tmp_path, gpus=2)
    address = gpu_address(0).removesuffix(".0")
    now_ns = time.time_ns()
    files.log(f"NVRM: Xid (PCI:{address}): 79, pid=1, name=python", now_ns - 10**9 * 86400 * 365)
    files.log(f"NVRM: Xid (PCI:{address}): 48, pid=1, name=python", now_ns)
    health = look(tmp_path, this_job())
    assert [event.number for event in health.events] == [48]
    assert [(place.rank, place.gpu) for place in health.ranks] == [(0, gpu_address(0))]


def test_a_counter_that_rises_during_the_look(tmp_path: Path):
    files = NodeFiles(tmp_path, gpus=1)

    def rise() -> None:
        time.sleep(0.3)  # the first look is over
        files.port("mlx5_1", symbol_error="5000")

    health = look(tmp_path, this_job(), rise)
    assert [(event.what, event.part) for event in health.events] == [("errors-rose", "mlx5_1")]


def test_a_rank_without_a_process_has_the_gpu_of_its_place(tmp_path: Path):
    NodeFiles(tmp_path, gpus=2)
    health = look(tmp_path, this_job(0, 1))
    assert [(place.rank, place.gpu) for place in health.ranks] == [
        (0, gpu_address(0)),
        (1, gpu_address(1)),
    ]


def test_ras_is_asked_at_the_address_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    NodeFiles(tmp_path, gpus=1)
    with RasServer([communicator([os.getpid(), 2], [9, 8])]) as server:
        monkeypatch.setattr(process, "environment", lambda _: server.environment)
        health = look(tmp_path, this_job())
    assert health.ras is not None and health.ras.communicators[0].behind[0].rank == 1
    assert server.commands.count("verbose status") == 1


def test_ras_is_a_witness_where_the_group_is_not_known(tmp_path: Path):
    """Ranks that wait for their devices show no group."""
    hosts = hosts_of("stuck")
    pids = [one.log.pid for host in hosts for one in host.samples]
    NodeFiles(tmp_path, gpus=2)
    with RasServer([communicator(pids, [9] * 7 + [8])]) as server:
        from commlens.health import ras

        report = ras.ask(server.environment)
    hosts[0].health = NodeHealth("n0", ras=report)
    for host in hosts:
        for one in host.samples:
            assert one.call is not None
            one.call = type(one.call)("device", "synchronize", line=one.call.line)
    found = judge(hosts)
    assert found.cause is not None and found.cause.ras is not None
    assert (found.cause.ras.says, found.cause.ras.behind) == ("disagrees", [7])
