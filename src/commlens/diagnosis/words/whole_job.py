"""Words about a job as a whole: what was looked at and what is missing, and what is found where no
rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.whole_job import MotionlessCase
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.missing import places
from commlens.diagnosis.words.told_by_logs import LOOK_AT_MORE
from commlens.model import nccl
from commlens.model.bypass import Bypass, bypasses_of
from commlens.model.cause import Fewer, LatentFault, NoFault, Unexplained
from commlens.model.collective import Collective
from commlens.model.grouping import grouped
from commlens.model.hazard import Hazard
from commlens.model.verdict import Finding, Verdict
from commlens.model.worlds import Worlds
from commlens.text import (
    capital,
    count,
    duration,
    format_ranks,
    frame_phrase,
    group_phrase,
    hazard_phrase,
    joined,
    number,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

_LOGS_NAMED = 3


def words_of_no_fault(job: JobIndex, cause: NoFault) -> Words:
    """Return what a verdict says about a job in which no fault shows."""
    finished = f"{capital(ranks_phrase(cause.finished))} finished." if cause.finished else ""
    return Words(
        summary=_summary_of_no_fault(job, cause),
        explanation=finished,
        next_step=(
            LOOK_AT_MORE
            if job.only_logs
            else "take a stack of each rank (py-spy dump): it shows whether, and in what, they wait"
            if cause.state == "only-issued"
            else ""
        ),
    )


def _summary_of_no_fault(job: JobIndex, cause: NoFault) -> str:
    ranks = ranks_phrase(cause.ranks)
    match cause.state:
        case "unreadable":
            return f"nothing can be said: no record of {ranks} is readable"
        case "running":
            return (
                "nothing is wrong: the job was running when it was dumped, and its collectives"
                " complete"
            )
        case "logs-tell-none":
            return f"no line tells a fault of {ranks}"
        case "newest-unreadable":
            cut = ranks_phrase(cause.newest_unreadable)
            return f"no fault shows, but the newest records of {cut} are unreadable"
        case "files-unreadable":
            files = count(cause.files_unreadable, "file")
            return f"no fault shows in what {ranks} recorded, but {files} could not be read"
        case "only-issued":
            return (
                f"no fault shows in what {ranks} issued; their recorder does not tell what"
                " completed, so it is not known whether they wait in it"
            )
        case "part-agrees":
            return f"nothing is wrong in what {ranks} recorded"
        case "all-agree":
            recorded = any(view.history for view in job.views.values())
            agree = "all collectives agree and no rank waits"
            return f"nothing is wrong: {agree if recorded else 'no collective was recorded'}"


def nothing_to_diagnose(missing: list[str]) -> Verdict:
    """Return the verdict on a job without readable records of any rank."""
    return Verdict(
        kind="undetermined",
        summary="there is nothing to diagnose",
        confidence="low",
        missing_evidence=missing,
    )


def nothing_told(logs: Sequence[str], missing: list[str]) -> Verdict:
    """Return the verdict on logs of a distributed job in which no line names a rank or a fault."""
    return Verdict(
        kind="undetermined",
        summary=f"no line of {joined(logs[:_LOGS_NAMED])} tells a fault or a rank",
        confidence="low",
        next_step=LOOK_AT_MORE,
        missing_evidence=missing,
        looked_at=count(len(logs), "text log"),
    )


_HOSTS_MAX = 4

INCOMPLETE = (
    "The ranks wait in too many different collectives: only some of them were followed to their"
    " causes."
)


def looked_at(job: JobIndex) -> str:
    """``"4 ranks, 812 records of 3 groups"``."""
    total = sum(len(view.history) for view in job.views.values())
    ranks = count(len(job.views), "rank")
    of = f" of {job.size}" if job.size != len(job.views) else ""
    groups = {key[1:] for key in job.channels}
    return f"{ranks}{of}, {count(total, 'record')} of {count(len(groups), 'group')}"


def last_attempt(dumps: Sequence[RankColumns]) -> str:
    """``": the last of 3 attempts in slurm-7.out"``; empty if each log holds one attempt."""
    counts = {dump.source: dump.attempt for dump in dumps if dump.attempt > 1}
    if not counts:
        return ""
    most = max(counts.values())
    return f": the last of {most} attempts in {joined([*counts][:_LOGS_NAMED])}"


def counted_only(ranks: int) -> str:
    """``"; 99,936 more ranks wait like some of these"``."""
    return f"; {count(ranks, 'more rank')} {'waits' if ranks == 1 else 'wait'} like some of these"


def missing_evidence(job: JobIndex) -> list[str]:
    """Return sentences about ranks without records, unreadable records and overwritten ones."""
    problems = grouped(
        (text.rstrip("."), rank)
        for rank, view in job.views.items()
        for text in [*view.log.problems, *_overwritten(view)]
    )
    return [
        *_no_record(job),
        *_notes_on_ranks_elsewhere(job),
        *_outsiders(job.worlds),
        *_lost_heads(job),
        *(f"{capital(ranks_phrase(ranks))}: {text}." for text, ranks in problems.items()),
        *_of_nccl(job),
        *map(past_torch, bypasses_of(view.log for view in job.views.values())),
    ]


def _of_nccl(job: JobIndex) -> Iterator[str]:
    """Yield what NCCL could not tell its plugin."""
    for rank, view in sorted(job.views.items()):
        told = view.log.nccl
        if told is not None and told.is_other_nccl:
            yield (
                f"{capital(rank_phrase(rank))}: NCCL {nccl.version_text(told.nccl_version)} tells"
                f" nothing, because commlens's plugin knows only {nccl.VERSIONS}."
            )
        if told is not None and told.lost:
            yield (
                f"{capital(rank_phrase(rank))}: {count(told.lost, 'event')} of NCCL could not be"
                " kept, because the plugin's tables were full."
            )


def past_torch(bypass: Bypass) -> str:
    """``"Rank 2 loaded deep_ep: 1,204 calls of it are recorded."``."""
    each = " of each" if len(bypass.ranks) > 1 else ""
    least, most = bypass.calls
    counted = count(most, "call") if least == most else f"{number(least)} to {count(most, 'call')}"
    recorded = {
        "calls": f"{counted}{each} {'is' if most == 1 else 'are'} recorded",
        "no-call": "its calls would be recorded, and none is among the records",
        "other-version": "its calls are not recorded, because this version has other signatures",
        "by-plugin": "NCCL's plugin records the communicators that it makes",
        "never": "its calls are not recorded",
    }[bypass.recorded]
    loaded = "loaded" if bypass.loaded else "called"
    return f"{capital(ranks_phrase(bypass.ranks))} {loaded} {bypass.library}: {recorded}."


def left_no_record(ranks: Sequence[int], size: int) -> str:
    """``"Rank 3 of 4 left no record."``."""
    return f"{capital(ranks_phrase(ranks))} of {size} left no record."


def _no_record(job: JobIndex) -> list[str]:
    notes = []
    if lost := [rank for rank in job.no_record if rank not in job.strangers]:
        notes.append(
            f"{capital(ranks_phrase(lost))} of {job.size} {verb(lost, 'has', 'have')} no line."
            if job.only_logs
            else left_no_record(lost, job.size)
        )
    return notes + [
        f"{capital(rank_phrase(rank))} (pid {log.pid}) is not recorded: {log.unrecorded}."
        for rank, log in sorted(job.strangers.items())
    ]


def _notes_on_ranks_elsewhere(job: JobIndex) -> list[str]:
    if not job.elsewhere:
        return []
    if job.meets_here:
        return [left_no_record(job.elsewhere, job.size)]
    hosts = sorted({view.log.host for view in job.views.values() if view.log.host})
    several = any(view.log.worlds.are_several for view in job.views.values())
    of_all = "" if several else f" of {job.size}"
    of = f" of {', '.join(hosts[:_HOSTS_MAX])}" if hosts else ""
    return [
        f"There are no records of {ranks_phrase(job.elsewhere)}{of_all}, which probably run"
        f" on another node: only those{of} are here."
    ]


def _outsiders(worlds: Worlds) -> list[str]:
    by_group = grouped(
        ((outsider.group, outsider.size), outsider.member)
        for outsider in worlds.outsiders
        if outsider.size
    )
    presumed = grouped((each.group, (each.number, each.member)) for each in worlds.presumed)
    return [
        f"{len(members)} of {size} members of group {group}, which the program made by hand,"
        f" {verb(members, 'is', 'are')} not recorded by commlens, or"
        f" {verb(members, 'has', 'have')} not come to it yet:"
        f" {verb(members, 'member', 'members')} {format_ranks(members)}."
        for (group, size), members in by_group.items()
    ] + [
        f"{capital(ranks_and_verb(numbers, 'is', 'are'))} presumed to be"
        f" {verb(members, 'member', 'members')} {format_ranks(members)} of group {group}: it has as"
        " many members as its world has ranks, and each member that came has its own rank in it."
        for group, pairs in presumed.items()
        for numbers, members in [zip(*pairs, strict=True)]
    ]


def _lost_heads(job: JobIndex) -> list[str]:
    lost = [rank for rank, view in job.views.items() if view.log.head_lost]
    if not lost:
        return []
    device = verb(lost, "its device waits", "their devices wait")
    entries = max(len(job.views[rank].history) for rank in lost)
    return [
        f"{capital(ranks_phrase(lost))}: the collective in which {device} is overwritten, since"
        f" more than {entries} were issued after it; it is older than the one named here"
        " (COMMLENS_BOX_ENTRIES)."
    ]


def _overwritten(view: RankView) -> list[str]:
    dropped = view.log.issued - len(view.history)
    if dropped <= 0 or view.log.problems:
        return []
    are = "is" if dropped == 1 else "are"
    active = view.dump is not None and view.dump.only_active
    left_out = " or left out of the dump" if active else ""
    return [f"the oldest {count(dropped, 'record')} {are} overwritten{left_out}"]


_OPS_SHOWN = 3  # collectives


def words_of_unexplained(cause: Unexplained, ops: Sequence[Collective]) -> Words:
    """Return what a finding says about ranks whose waits, in these ops, are unexplained."""
    they_wait = ranks_and_verb(cause.ranks, "waits", "wait")
    names = list(dict.fromkeys(map(op_phrase, ops)))
    more = f" and {len(names) - _OPS_SHOWN} more" if len(names) > _OPS_SHOWN else ""
    return Words(
        summary=(
            f"{they_wait} in too many different collectives to find the cause"
            if cause.too_many_waits
            else f"{they_wait} in {', '.join(names[:_OPS_SHOWN])}{more}; the ranks that"
            f" {verb(cause.ranks, 'it waits', 'they wait')} for are unknown"
        ),
        next_step="check that these are dumps of one job, and of one moment",
        would_raise_confidence="Nothing in these records shows for which rank they wait.",
    )


def words_of_fewer(_: Context, case: Case[Fewer]) -> Words:
    """Return what a finding says about ranks that issued fewer collectives."""
    assert case.op is not None
    cause, group = case.cause, group_phrase(case.op.channel.group)
    subject, others = ranks_phrase(cause.ranks), ranks_phrase(cause.others)
    fewer = count(cause.others_issued - cause.issued, "collective")
    or_they = "" if cause.culprits else f", or {others} issued one too many"
    return Words(
        summary=(
            f"{subject} issued {fewer} fewer than {'the others' if cause.culprits else others} on"
            f" {group}"
        ),
        explanation=(
            f"{capital(subject)} issued {cause.issued}, the others {cause.others_issued}; all ranks"
            " ended normally. The collectives have the same steps and lines, so the skipped one"
            " cannot be determined."
        ),
        next_step=f"find the iteration in which {subject} skipped one{or_they}",
        would_raise_confidence="Count steps with an optimizer, or issue from different lines.",
    )


_SHOWN = 4  # places


def words_of_motionless(_context: Context, case: MotionlessCase) -> Words:
    """Return what a finding says about a job that does not move."""
    cause = case.cause
    still = dict(zip(cause.ranks, cause.still_s, strict=True))
    where = ", ".join(
        [
            f"{ranks_and_verb(ranks, 'is', 'are')} in {frame_phrase(frame)}"
            for (frame, _), ranks in case.places.items()
            if frame is not None
        ][:_SHOWN]
    )
    evidence = []
    for (_, frames), ranks in case.places.items():
        for_how_long = duration(round(min(still[rank] for rank in ranks) * 1e9))
        chain = ", called by ".join(frame_phrase(frame) for frame in frames)
        evidence.append(f"{capital(ranks_phrase(ranks))}, for {for_how_long}: {chain}.")
    return Words(
        summary=(
            f"no rank has moved for {duration(round(min(cause.still_s) * 1e9))}, and none is in a"
            f" collective{f': {where}' if where else ''}"
        ),
        next_step="find out what the ranks wait for: a lock, a file, a child process or a server",
        evidence=evidence[:_SHOWN] + places(cause.helpers),
        would_raise_confidence=(
            "A rank's waits outside of collectives are not recorded; `py-spy dump --native` may"
            " show what it waits for."
        ),
    )


def words_of_hazard(cause: LatentFault, hazard: Hazard) -> Words:
    """Return what a finding says about a latent fault."""
    return Words(f"{hazard_phrase(hazard)} (on {ranks_phrase(cause.culprits)})")


def first_line(where: str, latent: Sequence[Finding]) -> str:
    """Return the summary of a verdict with latent faults alone: ``where`` nothing hangs."""
    return f"{where}; {count(len(latent), 'latent fault')}: {latent[0].summary}"
