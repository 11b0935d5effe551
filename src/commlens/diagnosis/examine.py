"""Records in, verdict out: select the job, index it, align the ranks, build the wait-for graph,
make findings. No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from commlens.diagnosis.align.alignment import Mismatch, align_records
from commlens.diagnosis.align.messages import find_astray
from commlens.diagnosis.causes.stuck_inside import completed_on
from commlens.diagnosis.causes.told_by_logs import find_told, unplaced_timeouts
from commlens.diagnosis.findings.find_all import find_all
from commlens.diagnosis.findings.hazards import hazard_findings
from commlens.diagnosis.graph.build import build_wait_graph
from commlens.diagnosis.graph.wait_graph import Graph, Instance, Node
from commlens.diagnosis.index.job_index import JobIndex, index_logs
from commlens.diagnosis.select.job import select_job
from commlens.diagnosis.straggler import straggler_verdict
from commlens.diagnosis.words import told_by_logs
from commlens.diagnosis.words.finding import finding_of
from commlens.diagnosis.words.told_by_logs import LOOK_AT_MORE, timeout_phrase
from commlens.matching.answer import Disagree
from commlens.matching.collectives import compare_coalesced
from commlens.model.cause import Kind
from commlens.model.collective import ChannelKey
from commlens.model.ranklog import RankLog
from commlens.model.verdict import NOTHING_FOUND, Finding, Verdict
from commlens.speed.pace import find_slow_in_records
from commlens.speed.step_times import StepTimes, step_times
from commlens.text import capital, count, joined, op_phrase, ranks_and_verb, ranks_phrase, verb

if TYPE_CHECKING:
    from commlens.diagnosis.index.columns import RankDump


_LOGS_NAMED = 3


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
    logs: Sequence[RankLog], *, problems: Sequence[str] = (), stalled_after_s: float = 1.0
) -> Verdict:
    """Return the verdict of :func:`examine_logs`, which takes these arguments."""
    return examine_logs(logs, problems=problems, stalled_after_s=stalled_after_s).verdict


def examine_logs(
    logs: Sequence[RankLog],
    *,
    problems: Sequence[str] = (),
    stalled_after_s: float = 1.0,
    slow: bool = False,
    unread: int = 0,
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
    """
    chosen, notes = select_job(logs)
    if not chosen:
        return _nothing_to_diagnose([*problems, *notes, "No rank's log could be read."])
    examined = _examine(index_logs(chosen, stalled_after_s), [*problems, *notes], unread)
    found = (
        find_slow_in_records(chosen) if slow and examined.verdict.kind in NOTHING_FOUND else None
    )
    if found is not None:
        missing, looked_at = examined.verdict.missing_evidence, examined.verdict.looked_at
        verdict = straggler_verdict(found, chosen)
        verdict.missing_evidence, verdict.looked_at = missing, looked_at
        return examined._replace(verdict=verdict)
    return examined


def examine_dumps(
    dumps: Sequence[RankDump],
    *,
    problems: Sequence[str] = (),
    stalled_after_s: float = 1.0,
    unread: int = 0,
) -> ExaminedJob:
    """Diagnose a job from other tools' dumps, and keep the evidence.

    Args:
        dumps: one for each file.
        problems: sentences about unreadable evidence.
        stalled_after_s: a collective that has been in flight for less than this in a running job is
            not stuck.
        unread: number of files that could not be read, and may belong to ranks without a dump.
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
        return (
            _nothing_told(logs, missing)
            if logs
            else _nothing_to_diagnose([*missing, "No rank's dump could be read."])
        )
    if chosen:
        job = index_dumps(chosen, stalled_after_s)
        job.timed_out = bool(timeouts) or any(dump.timed_out for dump in chosen)
        examined = _examine(job, missing, unread)
    else:
        examined = _nothing_to_diagnose(missing)
    verdict = examined.verdict if chosen else Verdict(missing_evidence=missing)
    if told is not None and not verdict.is_fault:
        finding = finding_of(told.cause, told_by_logs.words(told))
        looked_at = verdict.looked_at or count(len({dump.source for dump in dumps}), "text log")
        verdict = Verdict.from_findings([finding], missing_evidence=missing, looked_at=looked_at)
        verdict.findings = verdict.findings if verdict.is_fault else []
    elif timeouts:
        verdict.missing_evidence += [f"{timeout_phrase(timeout)}." for timeout in timeouts]
    return examined._replace(verdict=verdict)


def _examine(job: JobIndex, missing: list[str], unread: int) -> ExaminedJob:
    """Find the mismatches, build the wait-for graph and make the findings.

    Args:
        job: the indexed ranks of one job.
        missing: sentences about the missing evidence found so far; more are added.
        unread: number of files that could not be read.
    """
    mismatches = [*align_records(job), *find_astray(job)]
    graph = build_wait_graph(job, mismatches)
    findings = find_all(job, mismatches, graph)
    missing += _missing_evidence(job)
    looked_at = _looked_at(job)
    unexplained = _unexplained_waits(graph) if not findings else []
    if graph.incomplete:
        missing.append(
            "The ranks wait in too many different collectives: only some of them were followed to"
            " their causes."
        )
    if findings:
        verdict = Verdict.from_findings(findings, missing_evidence=missing, looked_at=looked_at)
    elif graph.incomplete or unexplained:
        verdict = Verdict.from_findings(
            [_unexplained(job, graph, unexplained)], missing_evidence=missing, looked_at=looked_at
        )
    else:
        verdict = _no_fault(job, missing, looked_at, unread)
    verdict.findings = [*verdict.findings, *hazard_findings(job)]
    return ExaminedJob(verdict, job, mismatches, graph)


def _nothing_to_diagnose(missing: list[str]) -> ExaminedJob:
    """Return the verdict on a job of which no rank's records are readable."""
    verdict = Verdict(
        kind="undetermined",
        summary="there is nothing to diagnose",
        confidence="low",
        missing_evidence=missing,
    )
    return ExaminedJob(verdict, index_logs([], 0.0), [], Graph())


def _nothing_told(logs: Sequence[str], missing: list[str]) -> ExaminedJob:
    """Return the verdict on logs of a distributed job of which no line tells a rank or a fault."""
    verdict = Verdict(
        kind="undetermined",
        summary=f"no line of {joined(logs[:_LOGS_NAMED])} tells a fault or a rank",
        confidence="low",
        next_step=LOOK_AT_MORE,
        missing_evidence=missing,
        looked_at=count(len(logs), "text log"),
    )
    return ExaminedJob(verdict, index_logs([], 0.0), [], Graph())


def _no_fault(job: JobIndex, missing: list[str], looked_at: str, unread: int) -> Verdict:
    """Return the verdict that nothing is wrong, or that the unreadable part of the evidence may
    show a fault.
    """
    complete = len(job.views) == job.size
    known = (
        "all collectives agree and no rank waits"
        if any(v.history for v in job.views.values())
        else "no collective was recorded"
    )
    summary = (
        f"nothing is wrong: {known}"
        if complete
        else f"nothing is wrong in what {ranks_phrase(job.views)} recorded"
    )
    unreadable = not any(view.history for view in job.views.values()) and all(
        view.log.problems for view in job.views.values()
    )
    cut = [rank for rank, view in job.views.items() if view.log.problems and view.lost_newest]
    kind: Kind = (
        "undetermined"
        if unreadable or cut or job.only_logs or (unread and not complete)
        else "healthy"
    )
    if unreadable:
        summary = f"nothing can be said: no record of {ranks_phrase(job.views)} is readable"
    elif job.moving:
        kind = "healthy"
        summary = (
            "nothing is wrong: the job was running when it was dumped, and its collectives complete"
        )
    elif job.only_logs:
        summary = f"no line tells a fault of {ranks_phrase(job.views)}"
    elif cut:
        summary = f"no fault shows, but the newest records of {ranks_phrase(cut)} are unreadable"
    elif kind == "undetermined":
        summary = (
            f"no fault shows in what {ranks_phrase(job.views)} recorded, but"
            f" {count(unread, 'file')} could not be read"
        )
    ended = (
        [rank for rank, view in job.views.items() if view.exit.kind == "clean"]
        if job.knows.process_exit
        else []
    )
    explanation = f"{capital(ranks_phrase(ended))} finished." if ended else ""
    finding = Finding(
        kind=kind,
        why="unknown",
        root_cause=False,
        culprits=[],
        victims=[],
        confidence="low" if kind == "undetermined" else "high" if complete else "medium",
        summary=summary,
        explanation=explanation,
        next_step=LOOK_AT_MORE if job.only_logs else "",
    )
    verdict = Verdict.from_findings([finding], missing_evidence=missing, looked_at=looked_at)
    verdict.findings = []
    return verdict


def _unexplained_waits(graph: Graph) -> list[Node]:
    """Return the stuck threads, except those that may go on: in a collective that all ranks have
    reached, or until a key is written.
    """
    sinks = graph.sinks()
    explained = graph.reaching(
        node
        for node in sinks
        if node.kind == "key" or (node.kind == "stuck" and not graph.is_alone(node))
    )
    return sorted(node for node in graph.blocks if node not in explained)


def _unexplained(job: JobIndex, graph: Graph, waits: Sequence[Node]) -> Finding:
    """Report ranks that are stuck for an unknown reason, or in too many different collectives: with
    no culprit.
    """
    stuck = sorted({node.rank for node in waits})
    if graph.incomplete:
        stuck = [
            rank
            for rank, view in job.views.items()
            if not view.died and any(block.stuck for block in view.blocks.values())
        ]
    summary = (
        f"{ranks_and_verb(stuck, 'waits', 'wait')} in too many different collectives to find the"
        " cause"
    )
    if not graph.incomplete:
        names = list(dict.fromkeys(op_phrase(graph.blocks[node].op) for node in waits))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        they_wait = f"{ranks_and_verb(stuck, 'waits', 'wait')} in {', '.join(names[:3])}{more}"
        summary = (
            f"{they_wait}; the ranks that {verb(stuck, 'it waits', 'they wait')} for are unknown"
        )
    return Finding(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=[],
        victims=stuck,
        confidence="low",
        summary=summary,
        next_step="check that these are dumps of one job, and of one moment",
        would_raise_confidence="Nothing in these records shows for which rank they wait.",
    )


def _looked_at(job: JobIndex) -> str:
    total = sum(len(view.history) for view in job.views.values())
    ranks = count(len(job.views), "rank")
    of = f" of {job.size}" if job.size != len(job.views) else ""
    unseen = sorted(
        {
            text.rstrip(".").removesuffix(" are not seen")
            for view in job.views.values()
            for text in view.log.coverage
        }
    )
    without = f"; not recorded: {'; '.join(unseen)}" if unseen else ""
    groups = {key[1:] for key in job.channels}
    return f"{ranks}{of}, {count(total, 'record')} of {count(len(groups), 'group')}{without}"


def _missing_evidence(job: JobIndex) -> list[str]:
    """Return sentences about ranks without records, unreadable records and overwritten ones."""
    notes: list[str] = []
    if lost := [rank for rank in job.no_record if rank not in job.strangers]:
        left = f"{verb(lost, 'has', 'have')} no line" if job.only_logs else "left no record"
        notes.append(f"{capital(ranks_phrase(lost))} of {job.size} {left}.")
    notes += [
        f"Rank {rank} (pid {log.pid}) is not recorded: {log.unrecorded}."
        for rank, log in sorted(job.strangers.items())
    ]
    if job.elsewhere and job.meets_here:
        notes.append(f"{capital(ranks_phrase(job.elsewhere))} of {job.size} left no record.")
    elif job.elsewhere:
        hosts = sorted({view.log.host for view in job.views.values() if view.log.host})
        of = f" of {', '.join(hosts[:4])}" if hosts else ""
        notes.append(
            f"There are no records of {ranks_phrase(job.elsewhere)} of {job.size}, which probably"
            f" run on another node: only those{of} are here."
        )
    by_text: dict[str, list[int]] = {}
    if lost := [rank for rank, view in job.views.items() if view.log.head_lost]:
        device, entries = (
            verb(lost, "its device waits", "their devices wait"),
            max(len(job.views[rank].history) for rank in lost),
        )
        notes.append(
            f"{capital(ranks_phrase(lost))}: the collective in which {device} is overwritten, since"
            f" more than {entries} were issued after it; it is older than the one named here"
            " (COMMLENS_BOX_ENTRIES)."
        )
    for rank, view in job.views.items():
        log = view.log
        for text in log.problems:
            by_text.setdefault(text.rstrip("."), []).append(rank)
        if log.issued > len(view.history) and not log.problems:
            dropped = log.issued - len(view.history)
            active = view.columns is not None and view.columns.dump.only_active
            overwritten = (
                f"the oldest {count(dropped, 'record')} {'is' if dropped == 1 else 'are'}"
                " overwritten"
            )
            by_text.setdefault(overwritten + " or left out of the dump" * active, []).append(rank)
    for text, ranks in by_text.items():
        notes.append(f"{capital(ranks_phrase(ranks))}: {text}.")
    return notes
