"""Records in, verdict out: select the job, index it, align the ranks, build the wait-for graph,
find the causes and word them. No torch, no I/O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from commlens.diagnosis.align.alignment import Mismatch, align_records
from commlens.diagnosis.align.messages import find_astray
from commlens.diagnosis.causes.find_all import find_all
from commlens.diagnosis.causes.hazards import find_hazards
from commlens.diagnosis.causes.lost_nodes import name_lost_nodes
from commlens.diagnosis.causes.no_fault import no_fault
from commlens.diagnosis.causes.stuck_inside import completed_on
from commlens.diagnosis.causes.told_by_logs import (
    TAKE_A_PROCESS,
    TELL_WHY,
    FoundInLogs,
    find_told,
    unplaced_timeouts,
)
from commlens.diagnosis.causes.unexplained import find_unexplained
from commlens.diagnosis.fold.alike import NONE_ALIKE, AlikeRanks, say_of_all, without_others
from commlens.diagnosis.graph.build import build_wait_graph
from commlens.diagnosis.graph.wait_graph import Graph, Instance
from commlens.diagnosis.index.job_index import JobIndex, index_logs
from commlens.diagnosis.select.job import select_job
from commlens.diagnosis.straggler import straggler_verdict
from commlens.diagnosis.words import evidence, hazards, told_by_logs, unexplained
from commlens.diagnosis.words.describe import describe_all
from commlens.diagnosis.words.finding import finding_of, locate
from commlens.diagnosis.words.no_fault import nothing_to_diagnose, nothing_told
from commlens.diagnosis.words.no_fault import words as no_fault_words
from commlens.diagnosis.words.told_by_logs import timeout_phrase
from commlens.matching.answer import Disagree
from commlens.matching.collectives import compare_coalesced
from commlens.model.cause import Ended, LostNode, Unrecorded
from commlens.model.collective import ChannelKey
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation, RankLog
from commlens.model.topology import Inventory
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.speed.pace import find_slow_in_records
from commlens.speed.step_times import StepTimes, step_times
from commlens.text import count, naming_alike

if TYPE_CHECKING:
    from commlens.diagnosis.index.columns import RankDump


class ExaminedJob(NamedTuple):
    """A verdict, and the indexed ranks, mismatches and wait-for graph behind it. Reports draw it
    and diagnose nothing.
    """

    verdict: Verdict
    job: JobIndex
    mismatches: list[Mismatch]
    graph: Graph

    def mismatch_at(self, key: ChannelKey, number: int) -> Disagree | None:
        """Return how the ranks disagree under one number of a channel; None if they agree or it
        cannot be determined.
        """
        tracks = {
            rank: self.job.views[rank].tracks.get(key) for rank in key[2] if rank in self.job.views
        }
        args = {
            rank: track.args_of(number)
            for rank, track in tracks.items()
            if track is not None and number in track.ops
        }
        answer = (
            compare_coalesced(args, key[2], splits_known=self.job.knows.splits)
            if len(args) > 1
            else None
        )
        return answer if isinstance(answer, Disagree) else None

    def completed_on(self, instance: Instance) -> list[int]:
        """Return the ranks on which a collective or message has completed."""
        return completed_on(self.job, instance)

    def step_times(self) -> StepTimes:
        """Return where the communication time of a step went."""
        return step_times([view.log for _, view in sorted(self.job.views.items())])


def diagnose_logs(
    logs: Sequence[RankLog],
    *,
    problems: Sequence[str] = (),
    stalled_after_s: float = 1.0,
    lost_nodes: Sequence[LostNode] = (),
    alike: AlikeRanks = NONE_ALIKE,
) -> Verdict:
    """Return the verdict of :func:`examine_logs`, which takes these arguments."""
    return examine_logs(
        logs,
        problems=problems,
        stalled_after_s=stalled_after_s,
        lost_nodes=lost_nodes,
        alike=alike,
    ).verdict


def examine_logs(
    logs: Sequence[RankLog],
    *,
    problems: Sequence[str] = (),
    stalled_after_s: float = 1.0,
    slow: bool = False,
    unread: int = 0,
    lost_nodes: Sequence[LostNode] = (),
    health: Sequence[NodeHealth] = (),
    alike: AlikeRanks = NONE_ALIKE,
    inventory: Inventory | None = None,
    foreseen: bool = False,
) -> ExaminedJob:
    """Diagnose a job from its black boxes, and keep the evidence.

    A pure function; the order of the logs does not matter.

    Args:
        logs: the ranks' records. Of several jobs, the one with most ranks is diagnosed.
        problems: sentences about unreadable evidence; they become part of the verdict's missing
            evidence.
        stalled_after_s: a collective that has been in flight for less than this in a running
            process is not stuck.
        slow: if nothing is wrong, look for ranks that made the job slow.
        unread: number of files that could not be read, and may belong to ranks without a log.
        lost_nodes: nodes that have fallen silent.
        health: the hardware of nodes, besides that in the logs.
        alike: ranks without a log that are in the state of ranks with one.
        inventory: where hosts are.
        foreseen: the logs tell what a run will do, without times.
    """
    chosen, notes = select_job(logs)
    if not chosen:
        missing = [*problems, *notes, "No rank's log could be read."]
        return _without_records(nothing_to_diagnose(missing))
    if alike.others:
        chosen = without_others(chosen, alike)
    job = index_logs(chosen, stalled_after_s, alike)
    job.more_health, job.inventory, job.foreseen = health, inventory, foreseen
    with naming_alike(alike.with_alike) if alike.others else contextlib.nullcontext():
        examined = _examine(job, [*problems, *notes], unread, lost_nodes)
    if alike.others:
        say_of_all(examined.verdict, alike)
        examined.verdict.looked_at += evidence.counted_only(len(alike.others))
    found = (
        find_slow_in_records(chosen) if slow and examined.verdict.kind in NOTHING_FOUND else None
    )
    if found is not None:
        missing, looked_at = examined.verdict.missing_evidence, examined.verdict.looked_at
        verdict = straggler_verdict(found, chosen, inventory=inventory)
        verdict.missing_evidence, verdict.looked_at = missing, looked_at
        return examined._replace(verdict=verdict)
    return examined


def examine_dumps(
    dumps: Sequence[RankDump],
    *,
    problems: Sequence[str] = (),
    stalled_after_s: float = 1.0,
    unread: int = 0,
    health: Sequence[NodeHealth] = (),
    inventory: Inventory | None = None,
    observed: Mapping[int, Observation] | None = None,
) -> ExaminedJob:
    """Diagnose a job from other tools' dumps, and keep the evidence.

    Args:
        dumps: one for each file.
        problems: sentences about unreadable evidence.
        stalled_after_s: a collective that has been in flight for less than this in a running job is
            not stuck.
        unread: number of files that could not be read, and may belong to ranks without a dump.
        health: the hardware of nodes.
        inventory: where hosts are.
        observed: what was seen of the ranks' processes around the time of the dumps.
    """
    # These need numpy, which the diagnosis of black boxes does without.
    from commlens.diagnosis.index.dump_index import index_dumps
    from commlens.diagnosis.select.dumps import select_dumps

    timeouts = unplaced_timeouts(dumps)
    chosen, notes = select_dumps(dumps)
    missing = [*problems, *notes]
    told = find_told(dumps, chosen, timeouts)
    if not chosen and told is None:
        logs = [dump.source for dump in dumps if dump.is_log]
        return _without_records(
            nothing_told(logs, missing)
            if logs
            else nothing_to_diagnose([*missing, "No rank's dump could be read."])
        )
    for dump in chosen:
        dump.observation = (observed or {}).get(dump.rank, dump.observation)
    if chosen:
        job = index_dumps(chosen, stalled_after_s)
        job.more_health, job.inventory = health, inventory
        job.timed_out = bool(timeouts) or any(dump.timed_out for dump in chosen)
        examined = _examine(job, missing, unread)
    else:
        examined = _without_records(nothing_to_diagnose(missing))
    verdict = examined.verdict if chosen else Verdict(missing_evidence=missing)
    looked_at = verdict.looked_at or count(len({dump.source for dump in dumps}), "text log")
    if told is not None:
        verdict = _with_told(verdict, told, looked_at)
    if timeouts and (told is None or verdict.cause is not told.cause):
        verdict.missing_evidence += [f"{timeout_phrase(timeout)}." for timeout in timeouts]
    return examined._replace(verdict=verdict)


def _with_told(verdict: Verdict, told: FoundInLogs, looked_at: str) -> Verdict:
    """Add what the logs tell of the job as a whole: as its fault if the records show none, or show
    only that its ranks were ended; else a reason for its end as a finding of its own.
    """
    finding = finding_of(told.cause, told_by_logs.words(told))
    missing = verdict.missing_evidence
    findings = verdict.findings if verdict.is_fault else []
    if not findings:
        added = Verdict.from_findings([finding], missing_evidence=missing, looked_at=looked_at)
        added.findings = added.findings if added.is_fault else []
        return added
    if told.cause.ending not in TELL_WHY:
        return verdict
    if isinstance(verdict.cause, Ended) or (
        isinstance(verdict.cause, Unrecorded) and told.cause.ending in TAKE_A_PROCESS
    ):
        for other in findings:
            other.root_cause = False
        findings = [finding, *findings]
    else:
        finding.root_cause = False
        findings = [*findings, finding]
    return Verdict.from_findings(findings, missing_evidence=missing, looked_at=looked_at)


def _examine(
    job: JobIndex, missing: list[str], unread: int, lost_nodes: Sequence[LostNode] = ()
) -> ExaminedJob:
    """Find the mismatches, build the wait-for graph, find the causes and word them.

    Args:
        job: the indexed ranks of one job.
        missing: sentences about the missing evidence found so far; more are added.
        unread: number of files that could not be read.
        lost_nodes: nodes that have fallen silent.
    """
    mismatches = [*align_records(job), *find_astray(job)]
    graph = build_wait_graph(job, mismatches)
    context = find_all(job, mismatches, graph)
    name_lost_nodes(context, lost_nodes)
    findings = describe_all(context)
    missing += evidence.missing_evidence(job)
    if graph.incomplete:
        missing.append(evidence.INCOMPLETE)
    if not findings and (found := find_unexplained(job, graph)) is not None:
        findings = [finding_of(found.cause, unexplained.words(found))]
    if findings:
        verdict = Verdict.from_findings(
            findings, missing_evidence=missing, looked_at=evidence.looked_at(job)
        )
    else:
        cause = no_fault(job, unread)
        finding = finding_of(cause, no_fault_words(job, cause))
        verdict = Verdict.from_findings(
            [finding], missing_evidence=missing, looked_at=evidence.looked_at(job)
        )
        verdict.findings = []
    verdict.findings = [
        *verdict.findings,
        *(
            locate(finding_of(found.cause, hazards.words(found)), None, found.hazard.source)
            for found in find_hazards(job)
        ),
    ]
    return ExaminedJob(verdict, job, mismatches, graph)


def _without_records(verdict: Verdict) -> ExaminedJob:
    """Return a verdict on a job of which no record is readable."""
    return ExaminedJob(verdict, index_logs([], 0.0), [], Graph())
