"""The verdict on a job that is only seen from outside (``commlens attach``).

:func:`judge` uses the stacks, the hosts' hardware and the ranks' log lines. If torch's Flight
Recorder dumped, :func:`judge_with_dumps` also diagnoses its dumps. They hold sequence numbers, so
they decide where stacks cannot; stacks show what the ranks do that the dumps name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.diagnosis.action import action_of
from commlens.diagnosis.api import examine_paths
from commlens.diagnosis.causes.circumstances import (
    add_init_meeting,
    add_ras_witness,
    affected_by,
    shared_place,
)
from commlens.diagnosis.causes.hardware import add_hardware_seen
from commlens.diagnosis.index.nodes import Node, whereabouts
from commlens.errors import CommlensError
from commlens.model.cause import AnyCause, Dead, Missing, StuckInside
from commlens.model.grouping import grouped
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation
from commlens.model.verdict import Verdict
from commlens.model.worlds import ONE_WORLD
from commlens.outside.causes import find_causes, none_waits
from commlens.outside.sample import HostSamples
from commlens.outside.seen import SeenJob
from commlens.outside.words import describe, describe_none_waits
from commlens.text import (
    capital,
    count,
    duration,
    joined,
    naming_worlds,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    sentence,
)

_MOST_PIDS: Final = 8


def judge(hosts: Sequence[HostSamples]) -> Verdict:
    """Return the verdict on one job.

    Args:
        hosts: the samples of each host, taken at about the same time.
    """
    job = SeenJob(hosts)
    with naming_worlds(job.worlds):
        verdict = _judge(hosts, job)
    verdict.worlds = job.worlds if job.worlds else ONE_WORLD
    return verdict


def _judge(hosts: Sequence[HostSamples], job: SeenJob) -> Verdict:
    missing = _missing_evidence(hosts, job)
    log_lines = [
        f"{rank_phrase(one.rank)}'s log: {line}" for one in job.samples for line in one.log_lines
    ]
    looked = f"{_job_words(job)} from outside, for {duration(job.window_s * 1e9)}"
    if job.gone and len(job.gone) == len(job.samples):
        return Verdict(
            summary="the job has ended while it was looked at",
            confidence="low",
            missing_evidence=missing,
            looked_at=looked,
        )
    causes = find_causes(job)
    for found in causes:
        _add_init_meeting(found.cause, job)
        _add_hardware(found.cause, hosts, job)
    findings = [describe(job, found) for found in causes]
    if findings:
        findings[0].evidence += log_lines
        verdict = Verdict.from_findings(findings, missing_evidence=missing, looked_at=looked)
        by_rank = {one.rank: host.host for host in hosts for one in host.samples}
        verdict.action = action_of(verdict, hosts=by_rank)
        return verdict
    missing += [
        f"A log has a line about an error, perhaps an old one: {line}" for line in log_lines
    ]
    finding = describe_none_waits(job, none_waits(job))
    verdict = Verdict.from_findings([finding], missing_evidence=missing, looked_at=looked)
    verdict.findings = []
    return verdict


def _add_init_meeting(cause: AnyCause, job: SeenJob) -> None:
    """Add to a cause in ``init_process_group`` how far the ranks have come there."""
    came = {
        one.rank: one.log.observation.store
        for one in job.samples
        if one.call is not None and one.call.op == "init_process_group"
    }
    if came and all(one.rank in came for one in job.stuck):
        world = job.world_of(job.stuck[0].rank)
        if all(one.rank in world for one in job.stuck):
            add_init_meeting(cause, world, came)


def _add_hardware(cause: AnyCause, hosts: Sequence[HostSamples], job: SeenJob) -> None:
    """Add to a cause what is wrong with the hardware of its hosts, and what NCCL's RAS says."""
    numbers = {(one.log.host, one.log.pid): one.rank for one in job.samples}
    healths = [
        msgspec.structs.replace(
            host.health,
            ranks=[
                msgspec.structs.replace(each, rank=numbers.get((host.host, each.pid), each.rank))
                for each in host.health.ranks
            ],
        )
        for host in hosts
        if host.health is not None
    ]
    spans_nodes = (
        len({host.host for host in hosts}) > 1 or len(job.samples) + len(job.gone) < job.size
    )
    add_hardware_seen(cause, healths, spans_nodes=spans_nodes)
    reports = [health.ras for health in healths if health.ras is not None]
    logs = {one.rank: one.log for one in job.samples}
    add_ras_witness(cause, reports, list(logs.values()), any_group=True)
    if isinstance(cause, (Dead, StuckInside)) and cause.root_cause:
        nodes = [Node(each, {place.rank: place for place in each.ranks}) for each in healths]
        affected = affected_by(cause, set(logs) - set(job.gone))
        cause.place = shared_place(affected, whereabouts(logs, nodes))


def _missing_evidence(hosts: Sequence[HostSamples], job: SeenJob) -> list[str]:
    notes = [note for host in hosts for note in host.notes]
    by_text = grouped((text, one.rank) for one in job.samples for text in one.log.problems)
    notes += [
        sentence(f"{capital(ranks_phrase(ranks))}: {text}") for text, ranks in by_text.items()
    ]
    unseen = sorted(set(range(job.size)) - set(job.ranks) - job.expected)
    if unseen:
        where = joined(dict.fromkeys(host.host for host in hosts))
        was = capital(ranks_and_verb(unseen, "was", "were"))
        notes.append(
            f"{was} not seen: no such process runs on {where}. `--hosts a,b` looks on other"
            " machines."
        )
    return notes


def _job_words(job: SeenJob) -> str:
    """Return ``"4 ranks of 4 of train.py (pids 411, 412, 413 and 414 on n03)"``, so that the user
    sees which job it is.
    """
    samples = job.samples
    several = [joined(world.name for world in job.worlds.worlds)] if job.worlds.are_several else []
    named = [*several, *(one.log.script for one in samples if one.log.script), ""]
    of = f" of {named[0]}" * bool(named[0])
    by_host = grouped((one.log.host, str(one.log.pid)) for one in samples[:_MOST_PIDS])
    pids = "; ".join(f"{joined(pids)} on {host}" for host, pids in by_host.items())
    more = ", ..." if len(samples) > _MOST_PIDS else ""
    where = f" ({'pid' if len(samples) == 1 else 'pids'} {pids}{more})" if pids else ""
    return f"{count(len(samples), 'rank')} of {job.size}{of}{where}"


def judge_with_dumps(hosts: Sequence[HostSamples]) -> Verdict:
    """Return the verdict on all evidence about one job."""
    verdict = judge(hosts)
    dumps = {name: content for host in hosts for name, content in host.dumps.items()}
    healths = [host.health for host in hosts if host.health is not None]
    recorded = _of_dumps(dumps, healths, verdict) if dumps else None
    if recorded is not None:
        seen = {one.rank: one.log.observation for host in hosts for one in host.samples}
        recorded = _with_stacks(recorded, verdict, seen, dumps, healths)
    if recorded is None or not recorded.is_fault or not verdict.is_fault:
        return verdict  # a job that moves has ops in flight at any moment, which is no fault
    for finding in verdict.findings:
        finding.root_cause = False
        if finding.cause is not None:
            finding.cause.root_cause = False
        finding.summary = f"seen from outside: {finding.summary}"
    recorded.looked_at = f"torch's own dumps ({recorded.looked_at}), and {verdict.looked_at}"
    recorded.missing_evidence = list(
        dict.fromkeys([*recorded.missing_evidence, *verdict.missing_evidence])
    )
    recorded.findings += verdict.findings
    return recorded


def _with_stacks(
    recorded: Verdict,
    verdict: Verdict,
    seen: Mapping[int, Observation],
    dumps: Mapping[str, bytes],
    healths: Sequence[NodeHealth],
) -> Verdict:
    """Return the verdict on the dumps with what the stacks show of the ranks that do not arrive, if
    the stacks show them outside of collectives, too.
    """
    outside = {
        rank
        for finding in verdict.findings
        if isinstance(finding.cause, Missing)
        for rank in finding.culprits
    }
    if not isinstance(recorded.cause, Missing) or not set(recorded.cause.ranks) <= outside:
        return recorded
    observed = {rank: seen[rank] for rank in recorded.cause.ranks if rank in seen}
    joined = _of_dumps(dumps, healths, verdict, observed)
    if joined is None or (joined.kind, joined.culprits) != (recorded.kind, recorded.culprits):
        return recorded
    return joined


def _of_dumps(
    dumps: Mapping[str, bytes],
    healths: Sequence[NodeHealth],
    verdict: Verdict,
    observed: Mapping[int, Observation] | None = None,
) -> Verdict | None:
    """Return the verdict on the dumps; None if no dump can be read, as ``verdict`` then says."""
    with tempfile.TemporaryDirectory(prefix="commlens-attach-") as folder:
        for name, content in dumps.items():
            Path(folder, name).write_bytes(content)
        try:
            return examine_paths(folder, health=healths, observed=observed).verdict
        except CommlensError as error:
            verdict.missing_evidence.append(f"Torch's own dumps could not be read: {error}")
            return None
