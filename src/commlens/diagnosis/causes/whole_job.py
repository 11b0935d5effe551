"""The causes for a job as a whole, if no rank waits for another: no fault, a standstill outside of
collectives, collectives that ranks did not issue, latent faults, and waits that nothing explains.

Each is independent of the others. Fewer collectives, for example: rank 2 of 4 ended well after 99
broadcasts and the others after 100. The root of a broadcast does not wait, so nothing hung.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from commlens.diagnosis.align.tie_break import UNDECIDED, by_majority
from commlens.diagnosis.causes.context import MOTIONLESS, Case, Context
from commlens.diagnosis.causes.helper_processes import helper_groups
from commlens.diagnosis.graph.wait_graph import Graph, WaitNode
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.job_index import JobIndex, RankView, Track
from commlens.diagnosis.standstill import is_at_rest
from commlens.matching.error_texts import may_be_peer_error
from commlens.model.cause import Fewer, LatentFault, Motionless, NoFault, NoFaultState, Unexplained
from commlens.model.collective import ChannelKey, Collective, Frame, FrameKind, State
from commlens.model.hazard import Hazard

_UNDETERMINED = (
    "unreadable",
    "logs-tell-none",
    "newest-unreadable",
    "files-unreadable",
    "only-issued",
)


def no_fault(job: JobIndex, unread: int) -> NoFault:
    """Return why no fault shows.

    Args:
        job: the indexed ranks.
        unread: number of files that could not be read, and may belong to ranks without records.
    """
    cut = [rank for rank, view in job.views.items() if view.log.problems and view.lost_newest]
    complete = len(job.views) == job.size
    state = _state(job, cut, unread, complete=complete)
    undetermined = state in _UNDETERMINED
    return NoFault(
        kind="undetermined" if undetermined else "healthy",
        why="unknown",
        root_cause=False,
        blamed_by="nobody",
        confidence="low" if undetermined else "high" if complete else "medium",
        state=state,
        ranks=list(job.views),
        # of other tools' dumps, nothing tells how a process ended
        finished=[
            rank
            for rank, view in job.views.items()
            if view.exit.kind == "clean" and not job.foreign
        ],
        newest_unreadable=cut,
        files_unreadable=unread,
    )


def _state(job: JobIndex, cut: list[int], unread: int, *, complete: bool) -> NoFaultState:
    views = job.views.values()
    if not any(view.history for view in views) and all(view.log.problems for view in views):
        return "unreadable"
    if job.moving:
        return "running"
    if job.only_logs:  # the log of a healthy rank need not have a line
        return "logs-tell-none"
    if cut:
        return "newest-unreadable"
    if unread and not complete:
        return "files-unreadable"
    if job.issued_only:
        return "only-issued"
    return "all-agree" if complete else "part-agrees"


def find_unexplained(job: JobIndex, graph: Graph) -> tuple[Unexplained, list[Collective]] | None:
    """Return the ranks that are stuck for an unknown reason, or in too many different collectives,
    where nothing else was found, and their waits; None if there are none.
    """
    waits = _unexplained_waits(graph)
    if not waits and not graph.incomplete:
        return None
    stuck = sorted({node.rank for node in waits})
    if graph.incomplete:
        stuck = [
            rank
            for rank, view in job.views.items()
            if not view.died and any(block.stuck for block in view.blocks.values())
        ]
    cause = Unexplained(
        kind="missing",
        why="unknown",
        root_cause=True,
        blamed_by="unknown",
        victims=stuck,
        confidence="low",
        ranks=stuck,
        too_many_waits=graph.incomplete,
    )
    return cause, [graph.blocks[node].op for node in waits]


def _unexplained_waits(graph: Graph) -> list[WaitNode]:
    """Return the stuck threads, except those that may go on: they wait, directly or through others,
    for a collective that all its ranks have reached, or for a key that may still be written. Of a
    group of which only one rank is known, nothing tells whether the others have reached it.
    """
    may_go_on = graph.reaching(
        node
        for node in graph.sinks()
        if node.kind == "key" or (node.kind == "stuck" and not graph.is_alone(node))
    )
    return sorted(node for node in graph.blocks if node not in may_go_on)


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
    op = context.job.views[others[0]].tracks[key].ops.get(least + 1)
    own = context.job.views[ranks[0]].tracks[key].ops.get(least)
    frame = own.source if own is not None and not is_tie else None
    context.cases.append(Case(cause, op, frame))


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


# left out of a stack: frames that do not show where the program stands
_INNER = (FrameKind.NATIVE, FrameKind.COMMLENS)
_SHOWN = 4  # frames of a stack


@dataclass(kw_only=True)
class MotionlessCase(Case[Motionless]):
    """Ranks that do not move."""

    # the user's innermost line and the innermost frames -> ranks
    places: dict[tuple[Frame | None, tuple[Frame, ...]], list[int]]


def find_motionless(context: Context) -> None:
    """Find a job that has stood still outside of collectives for several stall timeouts, and does
    not wait for requests.
    """
    job = context.job
    limit_ns = MOTIONLESS * job.stall_timeout_ns
    if not 1 < len(job.views) == job.size or not all(
        _is_motionless(view, limit_ns) and not view.log.is_idle for view in job.views.values()
    ):
        return
    places: dict[tuple[Frame | None, tuple[Frame, ...]], list[int]] = {}
    still_ns, reasons = [], set()
    for rank, view in sorted(job.views.items()):
        still_ns.append(view.now_ns - view.log.main_stack_since_ns)
        doing = activity.activity_of(
            view.log, view.exit, quiet_ns=still_ns[-1], stalled_after_ns=job.stalled_after_ns
        )
        reasons.add(doing.why)
        stack = view.log.main_stack.frames if view.log.main_stack is not None else ()
        frames = tuple(frame for frame in stack if frame.kind not in _INNER)[:_SHOWN]
        places.setdefault((doing.frame, frames), []).append(rank)
    cause = Motionless(
        kind="missing",
        why=doing.why if len(reasons) == 1 else "unknown",
        root_cause=True,
        blamed_by="undecided",
        victims=sorted(job.views),
        confidence="low",
        ranks=sorted(job.views),
        still_s=[ns / 1e9 for ns in still_ns],
        helpers=[call for calls in helper_groups(job).values() for call in calls],
    )
    frame = doing.frame if len(places) == 1 else None
    context.cases.append(MotionlessCase(cause, None, frame, places=places))


def _is_motionless(view: RankView, limit_ns: int) -> bool:
    """Return whether a running rank is outside of collectives, and has stood still for longer than
    the limit. A server that waits for requests does not count.
    """
    log, stack = view.log, view.log.main_stack
    if view.exit.ended or view.blocks or not is_at_rest(log):
        return False
    if activity.serves(stack.frames if stack is not None else ()):
        return False
    return 0 < log.main_stack_since_ns <= view.now_ns - limit_ns


def find_hazards(job: JobIndex) -> list[tuple[LatentFault, Hazard]]:
    """Return the latent faults, one for each line or pair of lines, and what the first of its ranks
    did. None changes the verdict.
    """
    by_line: dict[tuple[str, object, object], dict[int, Hazard]] = defaultdict(dict)
    for rank, view in sorted(job.views.items()):
        for hazard in view.log.hazards:
            by_line[hazard.lines].setdefault(rank, hazard)
    return [(_of_line(ranks), next(iter(ranks.values()))) for ranks in by_line.values()]


def _of_line(ranks: dict[int, Hazard]) -> LatentFault:
    first = next(iter(ranks.values()))
    touch = first.touch
    return LatentFault(
        kind="hazard",
        why="user-code",
        root_cause=False,
        culprits=sorted(ranks),
        blamed_by="arguments",
        confidence="high",
        what=first.what,
        op=first.op,
        times=first.times,
        source=_where(first.source),
        touched_by=touch.op if touch is not None else None,
        touched_at=_where(touch.source) if touch is not None else None,
        access=touch.access if touch is not None else None,
        operand=touch.operand if touch is not None else None,
        tensor=touch.tensor if touch is not None else None,
    )


def _where(frame: Frame | None) -> str | None:
    return frame.where if frame is not None else None
