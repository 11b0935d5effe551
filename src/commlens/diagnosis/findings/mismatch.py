"""Ranks that met in one collective or message but disagree on it, and ranks that are out of
step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from commlens.diagnosis.align.alignment import Mismatch, Race
from commlens.diagnosis.align.call_paths import Path, in_package, part, path_of
from commlens.diagnosis.align.out_of_step import steps_ahead
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.findings.dead import is_absorbed
from commlens.diagnosis.graph.wait_graph import Node
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.next_steps import mismatch_step
from commlens.diagnosis.words.phrases import prose
from commlens.diagnosis.words.sides import (
    UNDECIDED,
    describe_sides,
    separation,
    tie_step,
    told_apart,
)
from commlens.model.cause import Confidence, Kind, Why
from commlens.model.collective import Collective, FrameKind
from commlens.model.verdict import Finding
from commlens.text import (
    args_phrase,
    capital,
    count,
    frame_phrase,
    group_phrase,
    joined,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_ASPECTS = {"reduce-op": "reduce op", "layout": "memory layout"}
_EVIDENCE_MAX = 8
_CHECKPOINT = "torch/distributed/checkpoint/"
_WHY: dict[str, Why] = {"skipped": "skipped", "extra": "extra"}
_DEPARTURES = {
    "skipped": "; it looks like a skipped collective",
    "extra": "; it looks like an extra collective",
    "either": "; that one was skipped, or this one is extra",
}


def find_mismatches(context: Context, sinks: dict[int, Node]) -> None:
    """Make one finding for each mismatch, whether it blocks ranks or is silent, or for several of
    them that are one fault.
    """
    ties: dict[Hashable, Finding] = {}
    astray = {
        rank
        for mismatch in context.mismatches
        if mismatch.astray is not None and not mismatch.tie
        for rank in mismatch.culprits
    }
    for number, mismatch in enumerate(context.mismatches):
        node = sinks.get(number)
        blocked = context.blocked_by([node]) if node is not None else []
        first = min(
            (mismatch.ops[rank].index for rank in mismatch.culprits if rank in mismatch.ops),
            default=0,
        )
        order = (first, min(op.announced_ns for op in mismatch.ops.values()))
        op = _odd_op(mismatch)
        shown = (
            mismatch.shift.skipped if mismatch.shift is not None and mismatch.answer is None else op
        )
        if mismatch.racing is not None:
            context.add(
                _race(context, mismatch, mismatch.racing),
                op,
                mismatch.racing.main.source,
                blocked=len(blocked),
                order=order,
                mismatch=mismatch,
            )
            continue
        paths = _paths(context, mismatch, op)
        finding = _finding(context, mismatch, op, _name(mismatch, shown), blocked, paths)
        line = paths[0].line
        if mismatch.tie:
            lines = frozenset((other.op, other.call_lines) for other in mismatch.ops.values())
            known = ties.setdefault((finding.kind, mismatch.astray is None, lines), finding)
            # the same lines disagree for other ranks or in other groups: it is one fault
            if known is not finding and op.call_lines:
                known.victims = sorted({*known.victims, *finding.victims, *finding.culprits})
                if len(known.evidence) < _EVIDENCE_MAX:
                    known.evidence.append(f"The same: {finding.summary}.")
                continue
            finding.root_cause = mismatch.astray is None or astray.isdisjoint(mismatch.ops)
            _name_nobody(context, mismatch, finding)
            line = line if len({other.source for other in mismatch.ops.values()}) == 1 else None
        context.add(finding, shown, line, blocked=len(blocked), order=order, mismatch=mismatch)


def _name_nobody(context: Context, mismatch: Mismatch, finding: Finding) -> None:
    """Turn a finding into one on a tie: it tells all sides, and what separates them."""
    answer, ops = mismatch.answer, mismatch.ops
    parties = (
        [party.ranks for party in answer.parties]
        if answer is not None
        else [(rank,) for rank in sorted(ops)]
    )
    sides = [side for ranks in parties if (side := [rank for rank in ranks if rank in ops])]
    finding.culprits, finding.victims = [], sorted({*finding.culprits, *finding.victims})
    told = describe_sides(sides, ops)
    finding.explanation = prose(told, separation(context, sides), finding.explanation)
    if mismatch.astray is None:
        finding.next_step = tie_step([ops[side[0]] for side in sides])


def _paths(context: Context, mismatch: Mismatch, op: Collective) -> tuple[Path, Path]:
    """Return the call paths of the first culprit and of the others, from where they part."""
    culprit = next((rank for rank, own in mismatch.ops.items() if own is op), -1)
    members = [rank for rank in mismatch.ops if rank not in mismatch.culprits]
    if not members or mismatch.pair is not None:
        return path_of(op), path_of(mismatch.ops[min(members)]) if members else Path(None, "", "")
    return part(context.job, culprit, op, min(members), mismatch.ops[min(members)])


def _race(context: Context, mismatch: Mismatch, race: Race) -> Finding:
    """Make a finding of two threads on each rank whose collectives come in any order: no rank is to
    blame.
    """
    group, answer = group_phrase(mismatch.channel.group), mismatch.answer
    detail = f": {answer.detail}" if answer is not None else ""
    second, main = (f"{op.op} at {_thread_line(op)}" for op in (race.other, race.main))
    is_checkpoint = any(_CHECKPOINT in frame.file for frame in race.other.stack)
    every = set(mismatch.ops) <= set(race.ranks)
    unseen = ranks_phrase(set(mismatch.ops) - set(race.ranks)) if not every else ""
    return Finding(
        kind=f"mismatch/{answer.aspect}" if answer is not None else "mismatch/op",  # type: ignore[arg-type]
        why="in-collective",
        root_cause=True,
        culprits=[],
        victims=sorted(mismatch.ops),
        confidence="high" if every else "medium",
        summary=(
            f"two threads use {group} without an order between them{', on every rank' * every}:"
            f" {second} and, in the main thread, {main} come in any order"
        ),
        explanation=prose(
            f"The ranks disagree in #{mismatch.number}{detail}.",
            (
                f"{capital(ranks_phrase(race.ranks))} had collectives of both threads in flight at"
                " once."
                if race.ranks
                else ""
            ),
            "Which thread comes first changes from run to run, so no rank is at fault.",
            *_aborted_by_it(context, mismatch),
        ),
        next_step=(
            f"give {'the checkpoint' if is_checkpoint else 'one of the threads'} a group of its"
            " own "
        )
        + (
            "(process_group=dist.new_group() of the call that saves)"
            if is_checkpoint
            else "(new_group)"
        )
        + f", or issue all collectives of {group} from one thread",
        would_raise_confidence=(
            f"{capital(unseen)} had not both in flight at once, as far as is recorded."
            if unseen
            else None
        ),
    )


def _aborted_by_it(context: Context, mismatch: Mismatch) -> list[str]:
    """``["Rank 0 died of SIGABRT because of it."]``: gloo aborts a process whose tensor has the
    wrong size.
    """
    by_text: dict[str, list[int]] = {}
    for rank in mismatch.key[2]:
        view = context.job.views.get(rank)
        if view is not None and view.exit.kind == "own" and is_absorbed(context, rank):
            by_text.setdefault(view.exit.text, []).append(rank)
    return [
        f"{capital(ranks_phrase(ranks))} {text} because of it." for text, ranks in by_text.items()
    ][:3]


def _thread_line(op: Collective) -> str:
    """Return the user's line that issued an op; in a thread of torch's, the line that tells its
    purpose.
    """
    if op.source is not None:
        return frame_phrase(op.source)
    frames = [frame for frame in op.stack if frame.kind is FrameKind.TORCH]
    told = [frame for frame in frames if _CHECKPOINT in frame.file] or frames
    if not told:
        return "an unknown line"
    place = (
        told[-1]
        if _CHECKPOINT not in told[-1].file
        else next((one for one in told if one.function.endswith("save")), told[0])
    )
    return f"{in_package(place)}{' (a checkpoint)' * (_CHECKPOINT in place.file)}"


def _odd_op(mismatch: Mismatch) -> Collective:
    """Return the record of the first culprit that has one."""
    return next(
        (mismatch.ops[rank] for rank in sorted(mismatch.culprits) if rank in mismatch.ops),
        next(iter(mismatch.ops.values())),
    )


def _name(mismatch: Mismatch, op: Collective) -> str:
    if mismatch.pair is None:
        return op_phrase(op)
    sent, received = mismatch.pair
    return (
        f"message #{mismatch.number} from rank {received.peer} to rank {sent.peer} in"
        f" {group_phrase(mismatch.channel.group)}"
    )


def _finding(
    context: Context,
    mismatch: Mismatch,
    op: Collective,
    name: str,
    blocked: Sequence[int],
    paths: tuple[Path, Path],
) -> Finding:
    views = context.job.views
    culprits = sorted(mismatch.culprits)
    subject = ranks_phrase(culprits)
    members = [rank for rank in mismatch.ops if rank not in culprits]
    usual = mismatch.ops[min(members)] if members else None
    failed = (
        {rank for rank in mismatch.key[2] if rank in views and views[rank].exit.failed}
        if not mismatch.silent
        else set()
    )
    aborted = sorted(
        rank for rank in failed if views[rank].exit.kind == "own" and is_absorbed(context, rank)
    )
    held = sorted(set(blocked) - set(culprits))
    skip = _skip_evidence(
        mismatch,
        culprits,
        op,
        usual,
        paths,
        is_known_place=_has_been_there(views.get(culprits[0]), op),
    )
    if mismatch.tie:
        sides = []
    elif mismatch.answer is None:
        sides, skip = skip[:1], skip[1:]
    else:
        sides = _sides(context, mismatch, culprits, members, paths)
    ahead = (
        steps_ahead(context.job, culprits[0], op, usual)
        if usual is not None and mismatch.pair is None
        else 0
    )
    if usual is not None and ahead:
        did = (
            f"{subject} did {count(abs(ahead), 'optimizer step')}"
            f" {'more' if ahead > 0 else 'fewer'} than the others until then"
        )
        skip.append(f"{did}: {op.step}, they {usual.step}.")
    consequence = ""
    if mismatch.silent:
        consequence = "Nothing hung, but the result is wrong."
    elif stuck := [rank for rank in held if rank not in views or not views[rank].exit.refused]:
        consequence = f"{capital(ranks_and_verb(stuck, 'is', 'are'))} held up by it."
    kind: Kind = f"mismatch/{mismatch.answer.aspect}" if mismatch.answer is not None else "missing"  # type: ignore[assignment]
    confidence, more = _confidence(mismatch)
    return Finding(
        kind=kind,
        why=_WHY.get(mismatch.departure, "in-collective"),
        root_cause=True,
        culprits=culprits,
        victims=sorted({*held, *members, *failed} - set(culprits)),
        confidence=confidence,
        summary=_summary(mismatch, name, culprits, op, usual),
        explanation=prose(
            *sides,
            consequence,
            (
                f"{capital(ranks_phrase(aborted))} {views[aborted[0]].exit.text} because of it."
                if aborted
                else ""
            ),
        ),
        next_step=mismatch_step(mismatch, op, usual, paths),
        evidence=_evidence(mismatch, name, culprits, skip),
        would_raise_confidence=more,
    )


def _sides(
    context: Context,
    mismatch: Mismatch,
    culprits: Sequence[int],
    members: Sequence[int],
    paths: tuple[Path, Path],
) -> list[str]:
    """``["rank 2 (pid 7) issued all_reduce float32[50] SUM at train.py:20 step.", "Ranks 0-1,3
    issued ..."]``.
    """
    shown = [(rank, mismatch.ops[rank]) for rank in culprits[:3] if rank in mismatch.ops]
    first = shown[0][1].source if shown else None
    odd = "; ".join(
        f"{phrases.name(context, rank)}"
        f" {_issued(op, paths[0].phrase if op.source == first else frame_phrase(op.source))}"
        for rank, op in shown
    )
    usual = mismatch.ops[min(members)].source if members else None

    def said(rank: int) -> str:
        op = mismatch.ops[rank]
        return _issued(op, paths[1].phrase if op.source == usual else frame_phrase(op.source))

    others = "; ".join(
        f"{ranks_phrase(ranks)} {text}" for ranks, text in told_apart(members, said)[:3]
    )
    return [f"{odd}." if odd else "", f"{capital(others)}." if others else ""]


def _issued(op: Collective, where: str) -> str:
    args = args_phrase(op)
    peer = f" {'to' if op.op == 'send' else 'from'} rank {op.peer}" if op.peer is not None else ""
    tag = f" with tag {op.tag}" if op.tag else ""
    return (
        f"issued {op.op}{peer}{tag}{f', {args},' if peer and args else f' {args}' if args else ''}"
        f" at {where or 'an unknown line'}"
    )


def _evidence(mismatch: Mismatch, name: str, culprits: Sequence[int], skip: list[str]) -> list[str]:
    evidence = [mismatch.astray] if mismatch.astray else []
    answer = mismatch.answer if mismatch.astray is None else None
    if answer is not None and (
        mismatch.tie or len(answer.parties) > 2 or answer.aspect == "splits"
    ):
        evidence.append(f"{name}: {answer.detail}.")
    evidence += skip
    if mismatch.tie and not _has_one_side(mismatch):
        evidence.append(UNDECIDED)
    elif mismatch.by_history:
        evidence.append(
            "No side has a majority, but"
            f" {ranks_and_verb(culprits, 'departs from its', 'depart from their')} usual routine"
            " here."
        )
    elif mismatch.by_groups:
        others = ranks_phrase(sorted(set(mismatch.ops) - set(culprits)))
        evidence.append(
            f"No side has a majority, but the other groups of this kind issue here what {others}"
            " issued."
        )
    if mismatch.repeats:
        evidence.append(f"The same happened {count(mismatch.repeats, 'more time')} later.")
    return evidence


def _has_one_side(mismatch: Mismatch) -> bool:
    """Return whether only the sum over all ranks is wrong, so that there are no sides."""
    return mismatch.answer is not None and len(mismatch.answer.parties) == 1


def _confidence(mismatch: Mismatch) -> tuple[Confidence, str | None]:
    """Return the confidence, and what would raise it."""
    if mismatch.uncertain:
        return (
            "low",
            (
                "Issue the group's collectives from one thread: with several, their order is"
                " uncertain."
            ),
        )
    if _has_one_side(mismatch):
        return (
            "low",
            (
                "These records do not tell the splits, which would show the ranks that are wrong;"
                " `commlens launch` records them."
            ),
        )
    if mismatch.tie:
        record = (
            "The other ranks' records, or a"
            if len(mismatch.key[2]) > len(mismatch.ops) and mismatch.pair is None
            else "A"
        )
        return (
            "low",
            f"{record} run with more steps before the fault would show which one is wrong.",
        )
    few = mismatch.answer is None and mismatch.shift is not None and mismatch.shift.matches < 2
    if mismatch.by_history:
        return (
            "medium",
            "The routine decides, not a majority: a program may change its routine on purpose.",
        )
    if mismatch.by_groups:
        return (
            "medium",
            (
                "Other groups of the kind decide, not a majority: a program may use one group"
                " differently."
            ),
        )
    return (
        ("medium", "A single collective fits the shift; more of them would make it sure.")
        if few
        else ("high", None)
    )


def _summary(
    mismatch: Mismatch, name: str, culprits: list[int], op: Collective, usual: Collective | None
) -> str:
    subject, shift, answer = ranks_phrase(culprits), mismatch.shift, mismatch.answer
    if answer is None:
        assert shift is not None
        if mismatch.tie:
            return (
                f"{subject} are out of step from #{mismatch.number} of"
                f" {group_phrase(mismatch.channel.group)} on"
            )
        if mismatch.departure == "either":
            own = op_phrase(op, group=False)
            return (
                f"{subject} either skipped {name} or issued an extra {own}; everything after it"
                " pairs up wrongly"
            )
        if shift.by < 0:
            return (
                f"{subject} issued {count(-shift.by, 'collective')} too many, from {name} on;"
                " everything after it pairs up wrongly"
            )
        extra = f" and {shift.by - 1} more" if shift.by > 1 else ""
        return f"{subject} skipped {name}{extra}; everything after it pairs up wrongly"
    if mismatch.astray is not None:
        return answer.detail
    if mismatch.tie or usual is None:
        sides = " against ".join(
            f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in answer.parties[:3]
        )
        return f"ranks disagree in {name}: {sides}"
    skip = _DEPARTURES.get(mismatch.departure, "")
    if answer.aspect == "op":
        group = group_phrase(mismatch.channel.group)
        theirs = joined(
            sorted({own.op for rank, own in mismatch.ops.items() if rank not in culprits}), "or"
        )
        odd = told_apart(
            [rank for rank in culprits if rank in mismatch.ops], lambda rank: mismatch.ops[rank].op
        )
        issued = joined([f"{ranks_phrase(ranks)} issued {name}" for ranks, name in odd[:3]])
        return f"{issued} where the others issued {theirs} (#{mismatch.number} of {group}){skip}"
    if answer.aspect == "p2p":
        return f"{name} does not match: {answer.detail}"
    odd_parties = [party for party in answer.parties if set(party.ranks) & set(culprits)] or [
        answer.parties[-1]
    ]
    theirs = joined(
        [party.phrase for party in answer.parties if party not in odd_parties][:3], "or"
    )
    own = odd_parties[0].phrase
    if len(odd_parties) > 1:
        own = ", ".join(
            f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in odd_parties[:3]
        )
    aspect = _ASPECTS.get(answer.aspect, answer.aspect)
    return (
        f"{subject} {verb(culprits, 'disagrees', 'disagree')} on the {aspect} of {name}: {own}, the"
        f" others {theirs}{skip}"
    )


def _has_been_there(view: RankView | None, op: Collective) -> bool:
    """Return whether the rank has issued this op from the same lines before."""
    return view is not None and any(
        (each.op, each.call_lines) == (op.op, op.call_lines)
        for each in view.history
        if each.index < op.index
    )


def _and_so_on(matches: int) -> str:
    return f", and so on for {count(matches, 'collective')}" if matches > 1 else ""


def _skip_evidence(
    mismatch: Mismatch,
    culprits: list[int],
    op: Collective,
    usual: Collective | None,
    paths: tuple[Path, Path],
    *,
    is_known_place: bool,
) -> list[str]:
    shift, number, subject = mismatch.shift, mismatch.number, ranks_phrase(culprits)
    own = paths[0].phrase
    more = _and_so_on(shift.matches) if shift is not None else ""
    if shift is not None and mismatch.tie:
        other = next(rank for rank in culprits if rank != shift.rank)
        times = count(shift.by, "collective")
        return [
            f"#{number} of rank {shift.rank} matches #{number + shift.by} of rank {other}{more}: "
            f"rank {shift.rank} skipped {times}, or rank {other} issued {times} too many."
        ]
    if shift is not None and shift.by > 0:
        return [
            f"#{number} of {subject} ({own}) matches #{number + shift.by} of the others{more}; the"
            f" others' #{number} is {shift.skipped.op} at {paths[1].phrase}, step"
            f" {shift.skipped.step}."
        ]
    if shift is not None:
        match = f"#{number - shift.by} is their #{number}; #{number} at {own} is extra"
        return [
            f"From #{number - shift.by} on, the collectives of {subject} match earlier ones of the"
            f" others: {match}."
        ]
    they = verb(culprits, "it", "they")
    if mismatch.departure == "skipped":
        return [
            f"Until now, {subject} issued this right after the collective in which the others wait;"
            f" this time, {they} skipped that one."
        ]
    if (
        mismatch.departure
        or mismatch.tie
        or mismatch.pair is not None
        or usual is None
        or own == paths[1].phrase
    ):
        return []
    first = "" if is_known_place else " for the first time"
    return [
        f"{subject} issued {op.op} at {own}{first}: it may be extra, or {they} skipped the others'"
        f" {usual.op}."
    ]
