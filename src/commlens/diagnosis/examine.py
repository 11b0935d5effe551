"""Records in, verdict out: select the job, index it, align the ranks, build the wait-for graph,
find the causes and word them. No torch, no I/O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from commlens.diagnosis.action import action_of
from commlens.diagnosis.align.alignment import RecordMismatch, align_records
from commlens.diagnosis.align.messages import find_astray
from commlens.diagnosis.causes.circumstances import Affected, name_lost_nodes, shared_place
from commlens.diagnosis.causes.find_all import find_all
from commlens.diagnosis.causes.hardware import add_hardware_of_slow
from commlens.diagnosis.causes.straggler import find_straggler
from commlens.diagnosis.causes.stuck_inside import completed_on
from commlens.diagnosis.causes.told_by_logs import (
    TAKE_A_PROCESS,
    TELL_WHY,
    find_told,
    unplaced_timeouts,
)
from commlens.diagnosis.causes.whole_job import find_hazards, find_unexplained, no_fault
from commlens.diagnosis.fold.alike import NONE_ALIKE, AlikeRanks, say_of_all, without_others
from commlens.diagnosis.graph.build import build_wait_graph
from commlens.diagnosis.graph.wait_graph import Graph, Instance
from commlens.diagnosis.index.job_index import JobIndex
from commlens.diagnosis.index.log_index import index_logs
from commlens.diagnosis.index.nodes import nodes_of, whereabouts
from commlens.diagnosis.select.job import select_job
from commlens.diagnosis.words import told_by_logs, whole_job
from commlens.diagnosis.words.describe import describe_all
from commlens.diagnosis.words.finding import finding_of
from commlens.diagnosis.words.hardware import add_hardware
from commlens.diagnosis.words.straggler import words
from commlens.diagnosis.words.told_by_logs import timeout_phrase
from commlens.matching.answer import Disagree
from commlens.matching.collectives import compare_coalesced
from commlens.model.bypass import bypasses_of
from commlens.model.cause import Ended, LostNode, ToldByLogs, Unrecorded
from commlens.model.collective import ChannelKey, Stack
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation, RankLog
from commlens.model.topology import Inventory
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.speed.pace import SlowRanks, find_slow_in_records
from commlens.speed.step_times import StepTimes, step_times
from commlens.text import count, naming_alike, naming_worlds

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns


def straggler_verdict(
    slow: SlowRanks,
    logs: Sequence[RankLog],
    profiles: Mapping[int, Mapping[Stack, int]] = MappingProxyType({}),
    *,
    compared: Iterable[int] = (),
    inventory: Inventory | None = None,
) -> Verdict:
    """Return the verdict on ranks that make a job slow, with the place where they spend their time.

    Args:
        slow: the ranks.
        logs: of all ranks of a node, with the newest records and with observations.
        profiles: samples by stack of one of the slow ranks and of another, if they were taken.
        compared: the ranks that were compared; none: those of ``logs``.
        inventory: where hosts are.
    """
    case = find_straggler(slow, logs, profiles, compared)
    add_hardware_of_slow(case.cause, logs)
    by_rank = {log.rank: log for log in logs}
    case.cause.place = shared_place(
        Affected(case.cause.culprits, case.cause.victims),
        whereabouts(by_rank, nodes_of(by_rank), inventory),
    )
    said = add_hardware(words(case), case.cause)
    finding = finding_of(case.cause, said, None, case.frame)
    ranks = len(case.cause.culprits) + len(case.cause.victims)
    return Verdict.from_findings(
        [finding], looked_at=f"{count(ranks, 'rank')}, {count(slow.steps, 'step')}"
    )


class ExaminedJob(NamedTuple):
    """A verdict, and the indexed ranks, mismatches and wait-for graph behind it. Reports draw it
    and diagnose nothing.
    """

    verdict: Verdict
    job: JobIndex
    mismatches: list[RecordMismatch]
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
            compare_coalesced(args, key[2], splits_known=not self.job.foreign)
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
    chosen, notes, worlds = select_job(logs)
    if not chosen:
        missing = [*problems, *notes, "No rank's log could be read."]
        return _without_records(whole_job.nothing_to_diagnose(missing))
    if alike.others:
        chosen = without_others(chosen, alike)
    job = index_logs(chosen, stalled_after_s, alike)
    job.more_health, job.inventory, job.foreseen = health, inventory, foreseen
    job.worlds = worlds
    with (
        naming_alike(alike.with_alike) if alike.others else contextlib.nullcontext(),
        naming_worlds(worlds),
    ):
        examined = _examine(job, [*problems, *notes], unread, lost_nodes)
    examined.verdict.worlds = worlds
    if alike.others:
        say_of_all(examined.verdict, alike)
        examined.verdict.looked_at += whole_job.counted_only(len(alike.others))
    found = (
        find_slow_in_records(chosen) if slow and examined.verdict.kind in NOTHING_FOUND else None
    )
    if found is not None:
        verdict, whole = straggler_verdict(found, chosen, inventory=inventory), examined.verdict
        verdict.missing_evidence, verdict.looked_at = whole.missing_evidence, whole.looked_at
        verdict.bypasses = whole.bypasses
        return examined._replace(verdict=verdict)
    return examined


def examine_dumps(
    dumps: Sequence[RankColumns],
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
    logs = [dump.source for dump in dumps if dump.is_log]
    if chosen:
        for dump in chosen:
            dump.observation = (observed or {}).get(dump.rank, dump.observation)
        job = index_dumps(chosen, stalled_after_s)
        job.more_health, job.inventory = health, inventory
        job.timed_out = bool(timeouts) or any(dump.timed_out for dump in chosen)
        examined = _examine(job, missing, unread)
    elif told is not None:
        examined = _without_records(Verdict(missing_evidence=missing))
    elif logs:
        examined = _without_records(whole_job.nothing_told(logs, missing))
    else:
        missing.append("No rank's dump could be read.")
        return _without_records(whole_job.nothing_to_diagnose(missing))
    verdict = examined.verdict
    if told is not None:
        sources = count(len({dump.source for dump in dumps}), "text log")
        looked_at = verdict.looked_at or sources
        verdict = _with_told(verdict, told, looked_at, _hosts_of(examined.job))
    if verdict.cause is not told:
        verdict.missing_evidence += [f"{timeout_phrase(timeout)}." for timeout in timeouts]
    verdict.looked_at += whole_job.last_attempt(dumps)
    return examined._replace(verdict=verdict)


def _hosts_of(job: JobIndex) -> dict[int, str]:
    """Return the hosts of the ranks, as far as they are known."""
    return {rank: view.log.host for rank, view in job.views.items() if view.log.host}


def _with_told(
    verdict: Verdict, told: ToldByLogs, looked_at: str, hosts: Mapping[int, str]
) -> Verdict:
    """Add the facts in the logs about the job as a whole: as its fault if the records show none, or
    show only that its ranks were ended; else a reason for its end as a finding of its own.
    """
    finding = finding_of(told, told_by_logs.words(told))
    findings = verdict.findings if verdict.is_fault else []
    follows = isinstance(verdict.cause, Ended)
    was_cancelled = told.ending == "cancelled" and told.before_errors and follows
    if findings and told.ending not in TELL_WHY and not was_cancelled:
        return verdict
    takes_a_process = isinstance(verdict.cause, Unrecorded) and told.ending in TAKE_A_PROCESS
    if findings and not (follows or takes_a_process):
        finding.root_cause = False
        findings = [*findings, finding]
    else:
        for other in findings:
            other.root_cause = False
        findings = [finding, *findings]
    added = Verdict.from_findings(
        findings, missing_evidence=verdict.missing_evidence, looked_at=looked_at
    )
    added.action = action_of(added, hosts=hosts)
    added.findings = added.findings if added.is_fault else []
    return added


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
    missing += whole_job.missing_evidence(job)
    if graph.incomplete:
        missing.append(whole_job.INCOMPLETE)
    if not findings and (found := find_unexplained(job, graph)) is not None:
        findings = [finding_of(found[0], whole_job.words_of_unexplained(*found))]
    verdict = Verdict.from_findings(
        findings
        or [finding_of(cause := no_fault(job, unread), whole_job.words_of_no_fault(job, cause))],
        missing_evidence=missing,
        looked_at=whole_job.looked_at(job),
        bypasses=bypasses_of(view.log for view in job.views.values()),
    )
    latent = [
        finding_of(cause, whole_job.words_of_hazard(cause, hazard), None, hazard.source)
        for cause, hazard in find_hazards(job)
    ]
    if verdict.kind == "healthy" and latent:
        verdict.summary = whole_job.first_line("nothing hangs", latent)
    verdict.findings = [*findings, *latent]
    verdict.action = action_of(verdict, hosts=_hosts_of(job))
    return ExaminedJob(verdict, job, mismatches, graph)


def _without_records(verdict: Verdict) -> ExaminedJob:
    """Return a verdict on a job without a readable record."""
    return ExaminedJob(verdict, index_logs([], 0.0), [], Graph())
