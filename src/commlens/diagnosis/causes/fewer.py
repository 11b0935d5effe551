"""Ranks that issued fewer collectives than the others in a job that ended well."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.align.tie_break import UNDECIDED, by_majority
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.index.job_index import Track
from commlens.matching.error_texts import may_be_peer_error
from commlens.model.cause import Fewer
from commlens.model.collective import ChannelKey, State


@dataclass
class FoundFewer:
    """Ranks that issued fewer collectives, and on which channel."""

    cause: Fewer
    key: ChannelKey


def find_fewer(context: Context) -> None:
    """Find ranks that issued fewer collectives than the others: a root does not wait, so nothing
    hung.
    """
    mismatched = {mismatch.key for mismatch in context.mismatches}
    for key in sorted(context.job.users):
        views = [context.job.views[rank] for rank in context.job.users[key]]
        complete = len(views) == len(key[2]) and all(
            view.exit.kind == "clean" and not view.wrapped for view in views
        )
        last = {view.rank: _last_sent(view.tracks[key]) for view in views}
        if complete and key not in mismatched and len(set(last.values())) == 2:
            _add_fewer(context, key, last)


def _add_fewer(context: Context, key: ChannelKey, last: dict[int, int]) -> None:
    """Add the ranks that issued fewer collectives, unless they are the majority.

    Args:
        context: the job.
        key: the channel.
        last: number of the last collective of each rank.
    """
    most, least = max(last.values()), min(last.values())
    ranks = sorted(rank for rank, number in last.items() if number == least)
    others = sorted(rank for rank, number in last.items() if number != least)
    culprits, by = by_majority([others, ranks]) or UNDECIDED
    if culprits == tuple(others):
        return
    is_tie = not culprits
    cause = Fewer(
        kind="missing",
        why="skipped",
        root_cause=True,
        culprits=list(culprits),
        blamed_by=by,
        victims=sorted(last) if is_tie else others,
        confidence="low" if is_tie else "medium",
        ranks=ranks,
        others=others,
        issued=least,
        others_issued=most,
    )
    op = context.job.views[others[0]].tracks[key].ops[least + 1]
    own = context.job.views[ranks[0]].tracks[key].ops.get(least)
    frame = own.source if own is not None and not is_tie else None
    context.add(FoundFewer(cause, key), op, frame)


def _last_sent(track: Track) -> int:
    """Return the number of the last collective that the backend did not refuse because of the
    call's own arguments.
    """
    number = track.last
    while (
        (op := track.ops.get(number)) is not None
        and op.state is State.FAILED
        and not may_be_peer_error(op.error or "")
    ):
        number -= 1
    return number
