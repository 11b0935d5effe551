"""A job that stands still outside of collectives: all ranks may wait for one lock."""

from __future__ import annotations

from dataclasses import dataclass

from commlens.diagnosis.causes.context import MOTIONLESS, Context
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.standstill import is_at_rest
from commlens.model.cause import Motionless
from commlens.model.collective import Frame, FrameKind

# of servers, gRPC and Ray, which wait for requests
_IDLE = frozenset({"serve_forever", "wait_for_termination", "main_loop"})
_INNER = (FrameKind.NATIVE, FrameKind.COMMLENS)
_SHOWN = 4  # frames of a stack


@dataclass
class FoundMotionless:
    """Ranks that do not move, and where they are."""

    cause: Motionless
    # the user's innermost line and the innermost frames -> ranks
    places: dict[tuple[Frame | None, tuple[Frame, ...]], list[int]]


def find_motionless(context: Context) -> None:
    """Find a job that has stood still outside of collectives for several stall timeouts."""
    job = context.job
    limit_ns = MOTIONLESS * job.stall_timeout_ns
    if not 1 < len(job.views) == job.size or not all(
        _is_motionless(view, limit_ns) for view in job.views.values()
    ):
        return
    places: dict[tuple[Frame | None, tuple[Frame, ...]], list[int]] = {}
    still_ns = []
    for rank, view in sorted(job.views.items()):
        still_ns.append(view.now_ns - view.log.main_stack_since_ns)
        doing = activity.activity_of(
            view.log, view.exit, quiet_ns=still_ns[-1], stalled_after_ns=job.stalled_after_ns
        )
        stack = view.log.main_stack.frames if view.log.main_stack is not None else ()
        frames = tuple(frame for frame in stack if frame.kind not in _INNER)[:_SHOWN]
        places.setdefault((doing.frame, frames), []).append(rank)
    cause = Motionless(
        kind="missing",
        why=doing.why,
        root_cause=True,
        blamed_by="undecided",
        victims=sorted(job.views),
        confidence="low",
        ranks=sorted(job.views),
        still_s=[ns / 1e9 for ns in still_ns],
    )
    frame = doing.frame if len(places) == 1 else None
    context.add(FoundMotionless(cause, places), None, frame)


def _is_motionless(view: RankView, limit_ns: int) -> bool:
    """Return whether a running rank is outside of collectives, and has stood still for longer than
    the limit. An idle server is none.
    """
    log, stack = view.log, view.log.main_stack
    if view.exit.ended or view.blocks or not is_at_rest(log):
        return False
    for frame in stack.frames if stack is not None else ():
        if frame.function in _IDLE or "/asyncio/" in frame.file:
            return False
        if frame.kind is FrameKind.USER:
            break
    return 0 < log.main_stack_since_ns <= view.now_ns - limit_ns
