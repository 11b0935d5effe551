"""Ranks that met in one collective or message but disagree on it, and ranks that are out of step or
issued collectives of one shape in another order.

``align`` finds the mismatches and decides whom to blame; here each becomes a cause, with the ranks
that it blocks and that died of it. Example: in ``all_reduce #7``, rank 2 passes float32[5] and the
others float32[4]. The cause is ``mismatch/shape``, its culprit rank 2, and its victims the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from commlens.diagnosis.align.alignment import RecordMismatch
from commlens.diagnosis.align.call_paths import Path, parting_paths_of_ranks, path_of
from commlens.diagnosis.align.out_of_step import SwappedOrder, find_swapped_orders, steps_ahead
from commlens.diagnosis.align.routine import RANKS_MAX, count_rounds, with_next_line
from commlens.diagnosis.align.thread_race import Race
from commlens.diagnosis.causes.context import Case, Context, collective_of, group_of, source_of
from commlens.diagnosis.causes.dead import is_absorbed
from commlens.diagnosis.graph.wait_graph import WaitNode
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.matching.answer import Aspect
from commlens.matching.error_texts import is_peer_error, is_refusal
from commlens.model.cause import (
    MAIN_THREAD,
    Arguments,
    Confidence,
    Issued,
    Kind,
    Mismatch,
    MismatchDoubt,
    Rounds,
    Swapped,
    ThreadRace,
    Why,
)
from commlens.model.collective import ChannelKey, Collective
from commlens.model.grouping import grouped

_SIDES_MAX = 8
_WHY: dict[str, Why] = {"skipped": "skipped", "extra": "extra"}
_KINDS: dict[Aspect, Kind] = {
    "op": "mismatch/op",
    "shape": "mismatch/shape",
    "dtype": "mismatch/dtype",
    "reduce-op": "mismatch/reduce-op",
    "root": "mismatch/root",
    "splits": "mismatch/splits",
    "p2p": "mismatch/p2p",
    "device": "mismatch/device",
    "layout": "mismatch/layout",
}


@dataclass(kw_only=True)
class MismatchCase(Case[Mismatch]):
    """Ranks that disagree or are out of step. Its ``op`` is what the finding shows: that of the
    first culprit, or what a rank out of step skipped or added. On a tie, all ranks that met count
    as culprits.
    """

    mismatch: RecordMismatch
    paths: tuple[Path, Path]  # of the first culprit and of the others, from where they part
    been_there: bool  # whether the first culprit has issued its op from the same lines before
    raised: Collective | None  # its call of the others' op, just before its own one, which failed
    alike: list[MismatchCase] = field(default_factory=list)  # ties that are the same fault


def find_mismatches(context: Context, sinks: dict[int, WaitNode]) -> None:
    """Add a cause for each mismatch, also for those that block no rank. Ties between the same lines
    are one fault, and share a cause.

    Args:
        context: the job.
        sinks: by number of a mismatch, the node at which ranks wait because of it.
    """
    ties: dict[Hashable, MismatchCase] = {}
    blamed_for_astray = {
        rank
        for mismatch in context.mismatches
        if mismatch.astray is not None and not mismatch.tie
        for rank in mismatch.culprits
    }
    for number, mismatch in enumerate(context.mismatches):
        node = sinks.get(number)
        blocked = context.blocked_by([node]) if node is not None else []
        if mismatch.racing is not None:
            _add_race(context, mismatch, mismatch.racing, blocked)
            continue
        case = _case(context, mismatch, blocked)
        if mismatch.tie:
            first = ties.setdefault(_key_of_tie(case), case)
            if first is not case and mismatch.own.call_lines:
                first.alike.append(case)
                first.cause.alike += 1
                first.cause.victims = sorted({*first.cause.victims, *case.cause.victims})
                continue
            # A rank that is blamed for one message that never meets explains others of its own.
            case.cause.root_cause = mismatch.astray is None or blamed_for_astray.isdisjoint(
                mismatch.ops
            )
            if len({op.source for op in mismatch.ops.values()}) != 1:
                case.frame = None  # none of the lines is the one to look at
        context.cases.append(case)


def _order(mismatch: RecordMismatch) -> tuple[int, ...]:
    """Return a sort key: the mismatch whose culprit issued its collective earliest comes first."""
    first = min(
        (mismatch.ops[rank].index for rank in mismatch.culprits if rank in mismatch.ops), default=0
    )
    return (first, min(op.announced_ns for op in mismatch.ops.values()))


def _key_of_tie(case: MismatchCase) -> Hashable:
    """Return the key that ties of one fault share: the same lines disagree, on other ranks or in
    other groups.
    """
    ops = case.mismatch.ops.values()
    lines = frozenset((op.op, op.call_lines) for op in ops)
    return case.cause.kind, case.mismatch.astray is None, lines


def _case(context: Context, mismatch: RecordMismatch, blocked: Sequence[int]) -> MismatchCase:
    views, op, usual = context.job.views, mismatch.own, mismatch.usual
    culprits, first = set(mismatch.culprits), views.get(mismatch.culprits[0])
    waiting = sorted(set(blocked) - culprits)
    failed = _failed(context, mismatch)
    cause = _cause(mismatch, {*waiting, *mismatch.others, *failed} - culprits)
    cause.gone_on = _gone_on(context, mismatch, cause.not_seen)
    cause.held_up = [
        rank
        for rank in waiting
        if not (rank in views and views[rank].exit.refused) and rank not in cause.gone_on
    ]
    cause.ended_by_it = _ended_by_it(context, failed)
    if usual is not None and mismatch.pair is None:
        cause.steps_ahead = steps_ahead(context.job, mismatch.culprits[0], op, usual)
        cause.rounds = _rounds(context, culprits, mismatch.ops)
    shift = mismatch.shift if mismatch.answer is None else None
    paths = _paths(context, mismatch)
    return MismatchCase(
        cause,
        shift.skipped if shift is not None else op,
        paths[0].line,
        blocked=blocked,
        order=_order(mismatch),
        mismatch=mismatch,
        paths=paths,
        been_there=any(
            (each.op, each.call_lines) == (op.op, op.call_lines) and each.index < op.index
            for each in (first.history if first is not None else ())
        ),
        raised=_raised_before(first, op, usual),
    )


def _raised_before(
    view: RankView | None, own: Collective, usual: Collective | None
) -> Collective | None:
    """Return a rank's call before ``own`` if it is of the others' collective, from their line, and
    raised an error by itself.
    """
    last = max(
        (op for op in (view.log.collectives if view is not None else ()) if op.index < own.index),
        key=lambda op: op.index,
        default=None,
    )
    if last is None or usual is None or (last.op, last.source) != (usual.op, usual.source):
        return None
    by_itself = last.error and not is_peer_error(last.error) and not is_refusal(last.error)
    return last if by_itself else None


def _gone_on(context: Context, mismatch: RecordMismatch, ranks: Iterable[int]) -> list[int]:
    """Return those of these ranks, which have no record of it, that completed the collective, as
    the progress of its group in their dumps tells.
    """
    views = context.job.views
    dumps = {rank: views[rank].dump for rank in ranks if rank in views}
    return [
        rank
        for rank, dump in dumps.items()
        if dump is not None and dump.status.get(mismatch.key[1], (0, 0, 0))[2] >= mismatch.number
    ]


def _rounds(context: Context, culprits: set[int], ops: dict[int, Collective]) -> Rounds | None:
    """Return how far the ranks got at a line that the culprits reached more or less often than most
    of the job, while the ranks that got less far went on to a line that is new to them.
    """
    lines = {op.call_lines: op for op in ops.values()}
    if len(lines) != 2 or len(context.job.views) > RANKS_MAX:
        return None
    counted = [one for op in lines.values() if (one := count_rounds(context.job, op)) is not None]
    fitting = (with_next_line(context.job, one, ops) for one in counted if one.odd == culprits)
    return next((one for one in fitting if one.went_on), None)


def _cause(mismatch: RecordMismatch, victims: set[int]) -> Mismatch:
    answer, shift = mismatch.answer, mismatch.shift
    confidence, doubt = _confidence(mismatch)
    return Mismatch(
        kind=_KINDS[answer.aspect] if answer is not None else "missing",
        why=_WHY.get(mismatch.departure, "in-collective"),
        root_cause=True,
        culprits=[] if mismatch.tie else [*mismatch.culprits],
        blamed_by=mismatch.blamed_by,
        victims=sorted({*victims, *mismatch.culprits} if mismatch.tie else victims),
        confidence=confidence,
        group=group_of(mismatch.own),
        number=mismatch.number,
        issued=_issued(mismatch),
        not_seen=_not_seen(mismatch),
        departure=mismatch.departure or None,
        shifted_by=shift.by if shift is not None else 0,
        matches=shift.matches if shift is not None else 0,
        silent=mismatch.silent,
        refused=mismatch.refused,
        repeats=mismatch.repeats,
        doubt=doubt,
    )


# --- two threads that use a group in any order


def _add_race(
    context: Context, mismatch: RecordMismatch, race: Race, blocked: Sequence[int]
) -> None:
    """Add a race of two threads on each rank, whose collectives come in any order: no rank is to
    blame.
    """
    answer = mismatch.answer
    seen_on_all = set(mismatch.ops) <= set(race.ranks)
    cause = Mismatch(
        kind=_KINDS[answer.aspect] if answer is not None else "mismatch/op",
        why="in-collective",
        root_cause=True,
        blamed_by="nobody",
        victims=sorted(mismatch.ops),
        confidence="high" if seen_on_all else "medium",
        group=group_of(race.main),
        number=mismatch.number,
        issued=_issued(mismatch),
        not_seen=_not_seen(mismatch),
        silent=mismatch.silent,
        refused=mismatch.refused,
        race=ThreadRace(
            list(race.ranks),
            collective_of(race.main),
            source_of(race.main),
            collective_of(race.other),
            source_of(race.other),
            _thread_name(context, race.main),
            _thread_name(context, race.other),
        ),
        ended_by_it=_ended_by_it(context, mismatch.key[2]),
        repeats=mismatch.repeats,
        doubt=None if seen_on_all else "race-not-seen",
    )
    op, frame, order = mismatch.own, race.main.source, _order(mismatch)
    case = Case(cause, op, frame, blocked=blocked, order=order, mismatch=mismatch)
    context.cases.append(case)


def _thread_name(context: Context, op: Collective) -> str:
    """Return the name of the thread that issued a collective; empty if no stack tells it."""
    logs = [view.log for view in context.job.views.values()]
    log = next((log for log in logs if any(each is op for each in log.collectives)), None)
    if log is None or op.issue_thread == log.pid:
        return MAIN_THREAD if log is not None else ""
    stacks = [*log.observation.stacks, *log.stacks]
    return next((each.name for each in stacks if each.thread == op.issue_thread), "")


# --- what the ranks issued, and how it ended


def _issued(mismatch: RecordMismatch) -> list[Issued]:
    """Return the collectives that the ranks issued. Ranks that issued the same one at the same line
    share an entry.
    """
    alike = grouped(
        ((collective_of(op), _arguments(op), source_of(op)), rank)
        for rank, op in sorted(mismatch.ops.items())
    )
    largest = sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks))[:_SIDES_MAX]
    ops = [(ranks, mismatch.ops[ranks[0]]) for ranks in largest]
    return [Issued(ranks, collective_of(op), _arguments(op), source_of(op)) for ranks, op in ops]


def _arguments(op: Collective) -> Arguments:
    args = op.args
    return Arguments(args.payload, args.reduce_op, args.root, args.input_splits, args.output_splits)


def _not_seen(mismatch: RecordMismatch) -> list[int]:
    """Return the ranks of the group that have no record of this collective."""
    return sorted(set(mismatch.key[2]) - set(mismatch.ops)) if mismatch.pair is None else []


def _failed(context: Context, mismatch: RecordMismatch) -> list[int]:
    """Return the ranks of the group whose processes failed; none if no rank hangs because of it."""
    views = context.job.views
    if mismatch.silent:
        return []
    return sorted({rank for rank in mismatch.key[2] if rank in views and views[rank].exit.failed})


def _ended_by_it(context: Context, ranks: Iterable[int]) -> list[int]:
    """Return the ranks that died of a mismatch: gloo aborts a process whose tensor has the wrong
    size.
    """
    views = context.job.views
    return [
        rank
        for rank in ranks
        if rank in views and views[rank].exit.kind == "own" and is_absorbed(context, rank)
    ]


def _paths(context: Context, mismatch: RecordMismatch) -> tuple[Path, Path]:
    """Return the call paths of the first culprit and of the others, from where they part."""
    op, usual = mismatch.own, mismatch.usual
    if usual is None:
        return path_of(op), Path(None, "", "")
    if mismatch.pair is not None:
        return path_of(op), path_of(usual)
    culprit = next(rank for rank, own in mismatch.ops.items() if own is op)
    return parting_paths_of_ranks(context.job, culprit, op, mismatch.others[0], usual)


def has_one_side(mismatch: RecordMismatch) -> bool:
    """Return whether only the sum over all ranks is wrong, so that there are no sides."""
    return mismatch.answer is not None and len(mismatch.answer.parties) == 1


def _confidence(mismatch: RecordMismatch) -> tuple[Confidence, MismatchDoubt | None]:
    """Return the confidence, and the doubt that limits it."""
    if mismatch.uncertain:
        return "low", "order-of-threads"
    if has_one_side(mismatch):
        return "low", "splits-unknown"
    if mismatch.tie:
        return "low", "undecided"
    if mismatch.blamed_by == "routine" and mismatch.astray is None:
        return "medium", "routine-may-change"
    if mismatch.blamed_by == "other-groups":
        return "medium", "groups-may-differ"
    if mismatch.answer is None and mismatch.shift is not None and mismatch.shift.matches < 2:
        return "medium", "single-match"
    return "high", None


# --- collectives of one shape in another order


@dataclass(kw_only=True)
class SwappedCase(Case[Swapped]):
    """A rank that swapped collectives."""

    swap: SwappedOrder


def find_swapped(job: JobIndex, key: ChannelKey) -> list[SwappedCase]:
    """Return the ranks that issued collectives of a channel in another order."""
    return [
        SwappedCase(
            Swapped(
                kind="mismatch/op",
                why="in-collective",
                root_cause=True,
                culprits=[swap.rank],
                blamed_by="majority" if len(job.tracks_on(key)) > 2 else "routine",
                victims=[rank for rank in sorted(job.users[key]) if rank != swap.rank],
                confidence="medium",
                group=group_of(swap.own[0]),
                first=swap.number,
                last=swap.number + len(swap.own) - 1,
                own=[source_of(op) for op in swap.own],
                others=[source_of(op) for op in swap.others],
            ),
            swap.own[0],
            swap.own[0].source,
            swap=swap,
        )
        for swap in find_swapped_orders(job, key)
    ]
