"""What the wait-for graph does not show: a job that starts, ends, or ended with one collective too few."""

from __future__ import annotations

from commlens.diagnosis import activity
from commlens.diagnosis.activity import Doing
from commlens.diagnosis.findings.context import Context, make_finding
from commlens.diagnosis.findings.next_steps import missing_step
from commlens.diagnosis.index import View
from commlens.text import capital, count, group_phrase, ranks_phrase, verb


def find_left_over(context: Context) -> None:
    """Everybody ended well, and one rank issued fewer than the others: a root does not wait, so nothing hung."""
    troubled = {trouble.key for trouble in context.troubles}
    for key in sorted(context.world.users):
        views = [context.world.views[rank] for rank in context.world.users[key]]
        whole = len(views) == len(key[2]) and all(v.fate.kind == "clean" and not v.wrapped for v in views)
        lasts = {v.rank: v.tracks[key].last for v in views}
        if not whole or key in troubled or len(set(lasts.values())) != 2:
            continue
        most, least = max(lasts.values()), min(lasts.values())
        short = sorted(rank for rank, last in lasts.items() if last == least)
        if len(short) * 2 > len(views):
            continue
        other = next(v for v in views if v.rank not in short)
        op = other.tracks[key].ops[least + 1]
        own = context.world.views[short[0]].tracks[key].ops.get(least)
        who = ranks_phrase(short)
        summary = (
            f"{who} issued {count(most - least, 'collective')} fewer than the others on {group_phrase(context.world.channels[key].group)}"
        )
        explanation = (
            f"{capital(who)} issued {least}, the others {most}; everybody ended well. Which one was left out cannot be told: "
            "their steps and lines are the same."
        )
        tie = len(short) * 2 == len(views)
        context.add(
            make_finding(
                "missing", "skipped", short, [r for r in lasts if r not in short], "low" if tie else "medium", summary, explanation,
                f"find the iteration in which {who} left one out", op, own.source if own is not None else None, [],
                "Count steps with an optimizer, or issue from different lines.",
            )
        )  # fmt: skip


def find_starting(context: Context) -> None:
    """Nobody is in a collective, but ranks are stuck while the job starts: the store has no records."""
    views = list(context.world.views.values())
    inside = [v for v in views if not v.fate.ended and _is_initialising(v)]
    outside = [v for v in views if not v.fate.ended and not v.log.initialised and v not in inside]
    if not inside or (not outside and not context.world.no_record):
        return
    limit = context.world.stalled_after_ns
    still = [v for v in inside if v.log.observation.stack_moved is not True]
    if not still:
        return
    ranks = sorted(v.rank for v in inside)
    what = {v.rank: activity.doing(v.log, v.fate, stalled_after_ns=limit) for v in outside}
    idle = sorted(r for r, doing in what.items() if doing.observed and not doing.works)
    if idle or (context.world.no_record and not outside):
        absent = idle or context.world.no_record
        doing = what.get(absent[0]) or Doing("unknown", False, "left no record")
        summary = f"{ranks_phrase(absent)} never came to init_process_group; {ranks_phrase(ranks)} {verb(ranks, 'waits', 'wait')} there"
        finding = make_finding(
            "missing", doing.why, absent, ranks, "medium", summary, f"{capital(ranks_phrase(absent))} {doing.phrase}.",
            missing_step(doing, absent), None, doing.frame, [], "The output of these ranks would tell.",
        )  # fmt: skip
        context.add(finding)
        context.cases[-1].blocked = len(ranks)
    elif what:
        absent = sorted(what)
        doing = what[absent[0]]
        summary = f"{ranks_phrase(ranks)} {verb(ranks, 'waits', 'wait')} in init_process_group for {ranks_phrase(absent)}"
        finding = make_finding(
            "waiting", "initialising", [], ranks, "medium", summary, f"{capital(ranks_phrase(absent))} {doing.phrase}.", "wait", None,
            doing.frame, [], None, root=False,
        )  # fmt: skip
        context.add(finding)


def find_ended(context: Context) -> None:
    """Processes that ended badly, and nothing that says why."""
    views = context.world.views
    bad = sorted(rank for rank, view in views.items() if view.fate.failed)
    if not bad or any(case.finding.kind == "dead" for case in context.cases):
        return
    told = [rank for rank in bad if views[rank].fate.kind == "told"]
    peers = [rank for rank in bad if views[rank].fate.kind == "peer"]
    moments = {rank: views[rank].fate.at_ns for rank in bad if views[rank].fate.at_ns}
    if peers:
        first = min(peers, key=lambda rank: (moments.get(rank, 1 << 62), rank))
        summary = f"{ranks_phrase(peers)} ended because a peer did, or did not answer; no record says which"
        step = "look into the output of all ranks and of the other nodes for the first error"
        explanation = f"{context.name(first)} was the first to end: it {views[first].fate.text}; {context.last(first)}."
        finding = make_finding(
            "dead", "exception", [], bad, "low", summary, explanation, step, views[first].last_op, views[first].fate.source,
            [f"rank {rank} {views[rank].fate.text}." for rank in bad[:4]], "The records of the ranks that are not here would tell.",
        )  # fmt: skip
    else:
        summary = f"the job was ended from outside: {ranks_phrase(told)} {views[told[0]].fate.text}"
        step = "ask the scheduler (preemption, time limit), or look at who sent the signal"
        finding = make_finding(
            "dead", "killed", [], told, "medium", summary, f"{context.name(told[0])} {views[told[0]].fate.text}; {context.last(told[0])}.",
            step, views[told[0]].last_op, None, [], None,
        )  # fmt: skip
    context.add(finding)


def _is_initialising(view: View) -> bool:
    if view.log.initialised or view.log.collectives:
        return False
    stack = view.log.main_stack
    return stack is not None and any(frame.function == "init_process_group" for frame in stack.frames)
