"""Faults that the wait-for graph does not show: during startup, at the exit, and a collective too few before it."""

from __future__ import annotations

from commlens.diagnosis import activity
from commlens.diagnosis.activity import Activity
from commlens.diagnosis.findings.context import Context
from commlens.diagnosis.findings.next_steps import missing_step
from commlens.diagnosis.index import RankView
from commlens.model.collective import FrameKind
from commlens.model.verdict import Finding
from commlens.text import capital, count, duration, frame_phrase, group_phrase, ranks_and_verb, ranks_phrase

MOTIONLESS = 3  # stall timeouts
_IDLE = frozenset({"run_forever", "serve_forever", "main_loop"})  # of asyncio, Jupyter and Ray, which wait for requests


def find_fewer(context: Context) -> None:
    """Find ranks that issued fewer collectives than the others in a job that ended well: a root does not wait, so nothing hung."""
    mismatched = {mismatch.key for mismatch in context.mismatches}
    for key in sorted(context.job.users):
        views = [context.job.views[rank] for rank in context.job.users[key]]
        complete = len(views) == len(key[2]) and all(view.exit.kind == "clean" and not view.wrapped for view in views)
        last = {view.rank: view.tracks[key].last for view in views}
        if not complete or key in mismatched or len(set(last.values())) != 2:
            continue
        most, least = max(last.values()), min(last.values())
        ranks = sorted(rank for rank, number in last.items() if number == least)
        others = [rank for rank in last if rank not in ranks]
        if len(ranks) > len(others):
            continue
        op = context.job.views[others[0]].tracks[key].ops[least + 1]
        own = context.job.views[ranks[0]].tracks[key].ops.get(least)
        subject, group = ranks_phrase(ranks), group_phrase(context.job.channels[key].group)
        finding = Finding(
            kind="missing", why="skipped", root_cause=True, culprits=ranks, victims=others,
            confidence="low" if len(ranks) == len(others) else "medium",
            summary=f"{subject} issued {count(most - least, 'collective')} fewer than the others on {group}",
            explanation=f"{capital(subject)} issued {least}, the others {most}; all ranks ended normally. The collectives have the same "
            "steps and lines, so the skipped one cannot be determined.",
            next_step=f"find the iteration in which {subject} skipped one",
            would_raise_confidence="Count steps with an optimizer, or issue from different lines.",
        )  # fmt: skip
        context.add(finding, op, own.source if own is not None else None)


def find_starting(context: Context) -> None:
    """Find ranks that are stuck in init_process_group while no rank is in a collective: the store keeps no records."""
    running = [view for view in context.job.views.values() if not view.exit.ended]
    inside = [view for view in running if _is_initialising(view)]
    outside = [view for view in running if not view.log.initialised and view not in inside]
    if not inside or (not outside and not context.job.no_record):
        return
    if all(view.log.observation.stack_moved is True for view in inside):
        return
    ranks = sorted(view.rank for view in inside)
    activities = {view.rank: activity.activity_of(view.log, view.exit, stalled_after_ns=context.job.stalled_after_ns) for view in outside}
    idle = sorted(rank for rank, doing in activities.items() if doing.observed and not doing.works)
    absent = idle or sorted(activities) or context.job.no_record
    doing = activities.get(absent[0]) or Activity("unknown", False, "left no record")
    explanation = f"{capital(ranks_phrase(absent))} {doing.phrase}."
    if idle or not outside:
        finding = Finding(
            kind="missing", why=doing.why, root_cause=True, culprits=absent, victims=ranks, confidence="medium",
            summary=f"{ranks_phrase(absent)} never reached init_process_group; {ranks_and_verb(ranks, 'waits', 'wait')} there",
            explanation=explanation, next_step=missing_step(doing, absent),
            would_raise_confidence="The output of these ranks would show the reason.",
        )  # fmt: skip
        context.add(finding, None, doing.frame, blocked=len(ranks))
    else:
        finding = Finding(
            kind="waiting", why="initialising", root_cause=False, culprits=[], victims=ranks, confidence="medium",
            summary=f"{ranks_and_verb(ranks, 'waits', 'wait')} in init_process_group for {ranks_phrase(absent)}",
            explanation=explanation, next_step="wait",
        )  # fmt: skip
        context.add(finding, None, doing.frame)


def find_motionless(context: Context) -> None:
    """Find a job that has stood still outside of collectives for several stall timeouts: all ranks may wait for one lock."""
    job = context.job
    limit_ns = MOTIONLESS * job.stall_timeout_ns
    if not 1 < len(job.views) == job.size or not all(_is_motionless(view, limit_ns) for view in job.views.values()):
        return
    still = {rank: view.now_ns - view.log.main_stack_since_ns for rank, view in sorted(job.views.items())}
    places: dict[tuple[str, str], list[int]] = {}
    for rank, still_ns in still.items():
        view = job.views[rank]
        doing = activity.activity_of(view.log, view.exit, quiet_ns=still_ns, stalled_after_ns=job.stalled_after_ns)
        stack = view.log.main_stack
        frames = [frame_phrase(frame) for frame in stack.frames if frame.kind is not FrameKind.NATIVE][:4] if stack is not None else []
        places.setdefault((frame_phrase(doing.frame), ", called by ".join(frames)), []).append(rank)
    where = ", ".join([f"{ranks_and_verb(ranks, 'is', 'are')} in {place}" for (place, _), ranks in places.items() if place][:4])
    finding = Finding(
        kind="missing", why=doing.why, root_cause=True, culprits=[], victims=sorted(job.views), confidence="low",
        summary=f"no rank has moved for {duration(min(still.values()))}, and none is in a collective" + (where and f": {where}"),
        next_step="find out what the ranks wait for: a lock, a file, a child process or a server",
        evidence=[
            f"{capital(ranks_phrase(ranks))}, for {duration(min(still[rank] for rank in ranks))}: {chain}."
            for (_, chain), ranks in places.items()
        ][:4],
        would_raise_confidence="A rank's waits outside of collectives are not recorded; `py-spy dump --native` may show what it waits for.",
    )  # fmt: skip
    context.add(finding, None, doing.frame if len(places) == 1 else None)


def _is_motionless(view: RankView, limit_ns: int) -> bool:
    """Return whether a running rank is outside of collectives, and has stood still for longer than the limit. An idle server is none."""
    log, stack = view.log, view.log.main_stack
    _, works, watched = activity.movement(log.observation)
    if view.exit.ended or view.blocks or works or not watched or log.expecting is not None or log.observation.proc_state in ("T", "t"):
        return False
    for frame in stack.frames if stack is not None else ():
        if frame.function in _IDLE:
            return False
        if frame.kind is FrameKind.USER:
            break
    return 0 < log.main_stack_since_ns <= view.now_ns - limit_ns


def find_ended(context: Context) -> None:
    """Report processes that failed without a known cause."""
    views = context.job.views
    failed = sorted(rank for rank, view in views.items() if view.exit.failed and view.exit.kind != "gone")
    if not failed or any(case.finding.kind == "dead" for case in context.cases):
        return
    peers = [rank for rank in failed if views[rank].exit.kind == "peer"]
    if peers:
        first = min(peers, key=lambda rank: (views[rank].exit.at_ns or 1 << 62, rank))
        end, op = views[first].exit, views[first].last_op
        finding = Finding(
            kind="dead", why="exception", root_cause=True, culprits=[], victims=failed, confidence="low",
            summary=f"{ranks_phrase(peers)} ended because a peer ended or did not answer; no record shows which peer",
            explanation=f"{context.name(first)} was the first to end: it {end.text}; {context.last(first)}.",
            next_step="look at the output of all ranks, and of the other nodes, for the first error",
            evidence=[f"rank {rank} {views[rank].exit.text}." for rank in failed[:4]],
            would_raise_confidence="The records of the missing ranks would show it.",
        )  # fmt: skip
        context.add(finding, op, end.source)
        return
    stopped = [rank for rank in failed if views[rank].exit.kind == "terminated"]
    first, text = stopped[0], views[stopped[0]].exit.text
    finding = Finding(
        kind="dead", why="killed", root_cause=True, culprits=[], victims=stopped, confidence="medium",
        summary=f"the job was ended from outside: {ranks_phrase(stopped)} {text}",
        explanation=f"{context.name(first)} {text}; {context.last(first)}.",
        next_step="look at the scheduler's log (preemption, time limit), or for the sender of the signal",
    )  # fmt: skip
    context.add(finding, views[first].last_op, None)


def _is_initialising(view: RankView) -> bool:
    if view.log.initialised or view.log.collectives:
        return False
    stack = view.log.main_stack
    return stack is not None and any(frame.function == "init_process_group" for frame in stack.frames)
