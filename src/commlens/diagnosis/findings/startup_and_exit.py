"""Faults that the wait-for graph does not show: groups and meshes on which ranks disagree, the
exit, a collective too few before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import get_args

from commlens.diagnosis.causes.context import MOTIONLESS, Context
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.job_index import RankView, Track
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.diagnosis.words.phrases import prose
from commlens.diagnosis.words.sides import UNDECIDED, separation, told_apart
from commlens.matching.error_texts import ended_in_refusal, may_be_peer_error
from commlens.model.cause import Kind
from commlens.model.collective import Collective, FrameKind, State
from commlens.model.verdict import Finding
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    group_phrase,
    joined,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
)

# of servers, gRPC and Ray, which wait for requests
_IDLE = frozenset({"serve_forever", "wait_for_termination", "main_loop"})
_INNER = (FrameKind.NATIVE, FrameKind.COMMLENS)
_RULE = (
    "All ranks must call new_group in the same order with the same ranks, also for groups that they"
    " are not in."
)
_OPERATION = " Operation: "  # in the text of a refusal


def find_fewer(context: Context) -> None:
    """Find ranks that issued fewer collectives than the others in a job that ended well: a root
    does not wait, so nothing hung.
    """
    mismatched = {mismatch.key for mismatch in context.mismatches}
    for key in sorted(context.job.users):
        views = [context.job.views[rank] for rank in context.job.users[key]]
        complete = len(views) == len(key[2]) and all(
            view.exit.kind == "clean" and not view.wrapped for view in views
        )
        last = {view.rank: _last_sent(view.tracks[key]) for view in views}
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
        is_tie = len(ranks) == len(others)
        finding = Finding(
            kind="missing",
            why="skipped",
            root_cause=True,
            culprits=[] if is_tie else ranks,
            victims=sorted(last) if is_tie else others,
            confidence="low" if is_tie else "medium",
            summary=(
                f"{subject} issued {count(most - least, 'collective')} fewer than"
                f" {ranks_phrase(others) if is_tie else 'the others'} on {group}"
            ),
            explanation=(
                f"{capital(subject)} issued {least}, the others {most}; all ranks ended normally."
                " The collectives have the same steps and lines, so the skipped one cannot be"
                " determined."
            ),
            next_step=f"find the iteration in which {subject} skipped one"
            + (f", or {ranks_phrase(others)} issued one too many" * is_tie),
            would_raise_confidence="Count steps with an optimizer, or issue from different lines.",
        )
        context.add(finding, op, own.source if own is not None and not is_tie else None)


def find_setup_mismatch(context: Context) -> None:
    """Find the first call that makes groups or a mesh in which ranks that wait, or did so until
    they failed, ask for different ones.
    """
    views = context.job.views
    held = sorted(
        {node.rank for node in context.graph.blocks}
        | {rank for rank, view in views.items() if view.exit.failed}
    )
    calls: dict[tuple[int, str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, view in views.items() if held else ():
        for op in view.log.setups:
            # else made by its members alone
            if op.op != "new_group" or op.channel.group.name.isdecimal():
                calls[(op.channel.group.incarnation, op.op, op.sequence_number)][rank] = op
    for (_, name, _), ops in sorted(
        calls.items(), key=lambda item: min(op.announced_ns for op in item[1].values())
    ):
        sides: dict[str, list[int]] = defaultdict(list)
        for rank, op in sorted(ops.items()):
            sides[_asked(op)].append(rank)
        if len(sides) > 1 and (
            name != "init_process_group"
            or any(op.state is not State.COMPLETED for op in ops.values())
        ):
            _disagree(context, ops, sorted(sides.values(), key=len, reverse=True), held)
            return
    for (_, name, _), ops in sorted(calls.items()):
        others = [
            rank for rank in held if rank not in ops and rank in views and _went_on(context, rank)
        ]
        if name == "new_group" and others and any(op.in_flight for op in ops.values()):
            _went_on_without(context, ops, others)
            return


def _went_on(context: Context, rank: int) -> bool:
    """Return whether a rank waits in collectives, and not in a call that makes groups."""
    blocks = context.job.views[rank].blocks.values()
    return bool(blocks) and not any(block.op.is_setup for block in blocks)


def _went_on_without(context: Context, ops: dict[int, Collective], others: list[int]) -> None:
    """Report a call that makes a group, which some ranks of the job did not make: they wait in a
    later collective.
    """
    op = next(op for _, op in sorted(ops.items()) if op.in_flight)
    callers, odd = (
        sorted(ops),
        (others if len(others) < len(ops) else sorted(ops) if len(others) > len(ops) else []),
    )
    name = f"new_group #{op.sequence_number} of {_asked(op)}"
    missing, called = f"{ranks_phrase(others)} did not call {name}", f"{ranks_phrase(callers)} did"
    view = context.job.views[others[0]]
    later = next(iter(view.blocks.values())).op
    where = frame_phrase(op.source) or "an unknown line"
    finding = Finding(
        kind="mismatch/group",
        why="skipped" if odd == others else "initialising",
        root_cause=True,
        culprits=odd,
        victims=sorted({*callers, *others} - set(odd)),
        confidence="high" if odd else "low",
        summary=(
            f"{ranks_phrase(callers)} alone called {name}"
            if odd == callers
            else f"{missing}; {called}"
        ),
        explanation=prose(
            f"{capital(ranks_phrase(callers))} called it at {where};"
            f" {phrases.name(context, others[0])} waits in {op_phrase(later)} at"
            f" {frame_phrase(later.source) or 'an unknown line'}."
        ),
        next_step=f"find the branch that leads {ranks_phrase(others)} past {where}",
        evidence=[_RULE] + [UNDECIDED] * (not odd),
        would_raise_confidence=(
            None if odd else "As many ranks called it as did not: the program tells which is meant."
        ),
    )
    context.add(
        finding,
        op,
        later.source if odd == others else op.source,
        blocked=len(context.job.views),
        order=(0,),
    )


def _asked(op: Collective) -> str:
    """Return what a call asks for, in the words of reports."""
    group = op.channel.group
    if op.op == "new_group":
        return f"ranks {list(group.ranks)}" if len(group.ranks) <= 8 else ranks_phrase(group.ranks)
    if op.op != "init_process_group":
        return op.module or "an unknown mesh"
    # hosts have several names
    where = op.module.rpartition("/")[2].rpartition(":")[2] if op.module else ""
    at = f" at port {where}" if where.isdecimal() else f" at {op.module}" if op.module else ""
    return f"{count(len(group.ranks), 'rank')}{at}" + (
        f" with {group.backend}" if group.backend else ""
    )


def _disagree(
    context: Context, ops: dict[int, Collective], sides: list[list[int]], held: list[int]
) -> None:
    usual, odd = ops[sides[0][0]], ops[sides[1][0]]
    is_tie = len(sides[0]) <= len(ops) // 2
    culprits = [] if is_tie else sorted(rank for side in sides[1:] for rank in side)
    name = usual.op if usual.op == "init_process_group" else f"{usual.op} #{usual.sequence_number}"
    lines = []
    for side in sides[:4]:
        for ranks, where in told_apart(
            side, lambda rank: frame_phrase(ops[rank].source) or "an unknown line"
        )[:2]:
            op = ops[ranks[0]]
            mesh = f" for {op.module}" if op.op == "new_group" and op.module else ""
            lines.append(
                f"{capital(ranks_and_verb(ranks, 'asks', 'ask'))} for {_asked(op)}{mesh} at"
                f" {where}."
            )
    odd_ones = joined(
        [f"{ranks_and_verb(side, 'asks', 'ask')} for {_asked(ops[side[0]])}" for side in sides[1:4]]
    )
    differs = _how_it_differs(context, usual, odd, sides)
    how = f"{capital(ranks_phrase(sides[1]))} {differs}." if differs else ""
    finding = Finding(
        kind="mismatch/group",
        why="skipped" if how else "initialising",
        root_cause=True,
        culprits=culprits,
        victims=sorted({*held, *ops} - set(culprits)),
        confidence="low" if is_tie else "high",
        summary=(
            f"ranks disagree in {name}: "
            + " against ".join(
                f"{_asked(ops[side[0]])} ({ranks_phrase(side)})" for side in sides[:3]
            )
            if is_tie
            else f"{odd_ones} in {name}, the others for {_asked(usual)}"
        ),
        explanation=prose(*lines, how, separation(context, sides) if is_tie else ""),
        next_step=(
            f"compare {frame_phrase(odd.source) or name} on {ranks_phrase(sides[1])} with"
            f" {frame_phrase(usual.source) or name} on {ranks_phrase(sides[0])}"
        ),
        evidence=["No side has a majority, so the ranks at fault cannot be determined."] * is_tie
        + [_RULE] * (usual.op == "new_group"),
        would_raise_confidence=(
            "No side has a majority: the program tells which is meant." if is_tie else None
        ),
    )
    context.add(finding, odd, odd.source, blocked=len(context.job.views), order=(0,))
    for rank in held[:8]:
        for block in list(context.job.views[rank].blocks.values())[:1]:
            where = frame_phrase(block.op.source) or "an unknown line"
            finding.evidence.append(
                f"{phrases.name(context, rank)} waits in {op_phrase(block.op)} at {where}."
            )


def _how_it_differs(
    context: Context, usual: Collective, odd: Collective, sides: list[list[int]]
) -> str:
    """Return in which way the odd ranks' groups differ from the others', if the next groups show
    it.
    """

    def next_ranks(side: list[int]) -> set[tuple[int, ...]]:
        made = [
            (op, op.channel.group)
            for rank in side
            for op in context.job.views[rank].log.setups
            if op.op == usual.op
        ]
        inc, number = usual.channel.group.incarnation, usual.sequence_number + 1
        return {
            group.ranks
            for op, group in made
            if (group.incarnation, op.sequence_number) == (inc, number)
        }

    if usual.op != "new_group":
        return ""
    follows, precedes = (
        odd.channel.group.ranks in next_ranks(sides[0]),
        usual.channel.group.ranks in next_ranks(sides[1]),
    )
    if follows and precedes:
        return "made them in another order"
    if follows:
        return (
            f"{'skipped' if next_ranks(sides[1]) else 'did not begin with'} the group of"
            f" {_asked(usual)}"
        )
    return f"made a group of {_asked(odd)} too many" if precedes else ""


def find_motionless(context: Context) -> None:
    """Find a job that has stood still outside of collectives for several stall timeouts: all ranks
    may wait for one lock.
    """
    job = context.job
    limit_ns = MOTIONLESS * job.stall_timeout_ns
    if not 1 < len(job.views) == job.size or not all(
        _is_motionless(view, limit_ns) for view in job.views.values()
    ):
        return
    still = {
        rank: view.now_ns - view.log.main_stack_since_ns for rank, view in sorted(job.views.items())
    }
    places: dict[tuple[str, str], list[int]] = {}
    for rank, still_ns in still.items():
        view = job.views[rank]
        doing = activity.activity_of(
            view.log, view.exit, quiet_ns=still_ns, stalled_after_ns=job.stalled_after_ns
        )
        stack = view.log.main_stack
        frames = (
            [frame_phrase(frame) for frame in stack.frames if frame.kind not in _INNER][:4]
            if stack is not None
            else []
        )
        places.setdefault((frame_phrase(doing.frame), ", called by ".join(frames)), []).append(rank)
    where = ", ".join(
        [
            f"{ranks_and_verb(ranks, 'is', 'are')} in {place}"
            for (place, _), ranks in places.items()
            if place
        ][:4]
    )
    finding = Finding(
        kind="missing",
        why=doing.why,
        root_cause=True,
        culprits=[],
        victims=sorted(job.views),
        confidence="low",
        summary=(
            f"no rank has moved for {duration(min(still.values()))}, and none is in a collective"
        )
        + (where and f": {where}"),
        next_step="find out what the ranks wait for: a lock, a file, a child process or a server",
        evidence=[
            f"{capital(ranks_phrase(ranks))}, for {duration(min(still[rank] for rank in ranks))}:"
            f" {chain}."
            for (_, chain), ranks in places.items()
        ][:4],
        would_raise_confidence=(
            "A rank's waits outside of collectives are not recorded; `py-spy dump --native` may"
            " show what it waits for."
        ),
    )
    context.add(finding, None, doing.frame if len(places) == 1 else None)


def _is_motionless(view: RankView, limit_ns: int) -> bool:
    """Return whether a running rank is outside of collectives, and has stood still for longer than
    the limit. An idle server is none.
    """
    log, stack = view.log, view.log.main_stack
    _, works, watched = activity.movement(
        log.observation, device_is_busy=activity.device_is_busy(log)
    )
    if (
        view.exit.ended
        or view.blocks
        or works
        or not watched
        or log.expecting is not None
        or log.observation.proc_state in ("T", "t")
    ):
        return False
    for frame in stack.frames if stack is not None else ():
        if frame.function in _IDLE or "/asyncio/" in frame.file:
            return False
        if frame.kind is FrameKind.USER:
            break
    return 0 < log.main_stack_since_ns <= view.now_ns - limit_ns


def find_ended(context: Context) -> None:
    """Report processes that failed without a known cause."""
    views = context.job.views
    failed = sorted(
        rank for rank, view in views.items() if view.exit.failed and view.exit.kind != "gone"
    )
    if not failed or any(case.claim.kind == "dead" for case in context.cases):
        return
    peers = [rank for rank in failed if views[rank].exit.kind == "peer"]
    refused = [
        rank
        for rank in peers
        if views[rank].exit.refused and _OPERATION in (views[rank].log.exception or "")
    ]
    if refused:
        context.add(_refused_call(context, refused), None, views[refused[0]].exit.source)
    elif peers:
        first = min(peers, key=lambda rank: (views[rank].exit.at_ns or 1 << 62, rank))
        end, op = views[first].exit, views[first].last_op
        silent = context.job.no_record if context.job.only_logs else []
        suspects = silent if len(silent) == 1 else []
        where = ranks_phrase(suspects) if suspects else "all ranks, and of the other nodes,"
        which = (
            f"there is no line of {ranks_phrase(silent)}"
            if silent
            else "no record shows which peer"
        )
        finding = Finding(
            kind="dead",
            why="exception",
            root_cause=True,
            culprits=suspects,
            victims=failed,
            confidence="low",
            summary=f"{ranks_phrase(peers)} ended because a peer ended or did not answer; {which}",
            explanation=(
                f"{phrases.name(context, first)} was the first to end: it {end.text};"
                f" {phrases.last(context, first)}."
            ),
            next_step=f"look at the output of {where} for the first error",
            evidence=[f"rank {rank} {views[rank].exit.text}." for rank in failed[:4]],
            would_raise_confidence="The records of the missing ranks would show it.",
        )
        context.add(finding, op, end.source)
    stopped = [rank for rank in failed if views[rank].exit.kind == "terminated"]
    if peers or not stopped:
        return
    first, text = stopped[0], views[stopped[0]].exit.text
    signal = views[first].log.observation.signal or ""
    gone = sorted(rank for rank, view in views.items() if view.exit.kind == "gone")
    if gone:  # torchrun ends the others when one has failed
        finding = Finding(
            kind="dead",
            why="unknown",
            root_cause=True,
            culprits=gone if len(gone) == 1 else [],
            victims=stopped,
            confidence="medium",
            summary=(
                f"{ranks_and_verb(gone, 'is', 'are')} gone, and nobody saw how;"
                f" {_ended_like(views, stopped)}"
            ),
            explanation=f"{phrases.name(context, gone[0])}: {phrases.last(context, gone[0])}.",
            next_step=(
                f"look at the end of the output of {ranks_phrase(gone)}, and at the scheduler's log"
            ),
            would_raise_confidence=(
                "The system's log (dmesg, the scheduler) may show how it ended; `commlens launch`"
                " records it."
            ),
        )
        context.add(finding, views[gone[0]].last_op, None)
        return
    finding = Finding(
        kind="dead",
        why="killed",
        root_cause=True,
        culprits=[],
        victims=stopped,
        confidence="medium",
        summary=f"the job was ended from outside: {_ended_like(views, stopped)}",
        explanation=prose(
            f"{phrases.name(context, first)} {text}; {phrases.last(context, first)}.",
            outside_cause(signal),
        ),
        next_step=outside_step(signal),
        would_raise_confidence="The signal is known, its sender is not.",
    )
    context.add(finding, views[first].last_op, None)


def _ended_like(views: Mapping[int, RankView], ranks: list[int]) -> str:
    """``"ranks 1-3 were ended by SIGTERM"``: as the first of them."""
    text = views[ranks[0]].exit.text
    if len(ranks) > 1 and text.startswith("was "):
        text = text.replace("was ", "were ", 1)
    return f"{ranks_phrase(ranks)} {text}"


def _refused_call(context: Context, ranks: list[int]) -> Finding:
    """Return the finding for a refusal that no record explains: of a call of a user's function, or
    of a rank that ended and is not seen.
    """
    views = context.job.views
    named = {ended: rank for rank in ranks for ended in ended_in_refusal(views[rank].log.exception)}
    if first := sorted(set(named) - set(ranks)):
        return _ended_early(context, first, views[named[first[0]]], ranks)
    reason, _, operation = (
        (views[ranks[0]].log.exception or "").partition(": ")[2].partition(_OPERATION)
    )
    reason = (
        reason.removeprefix("Cannot apply desired operation")
        .lstrip(":")
        .strip()
        .removeprefix("due to ")
        .rstrip(".")
    )
    kind = f"mismatch/{reason.split(' ')[0]}"
    return Finding(
        kind=kind
        if kind in get_args(Kind)
        else "missing"
        if "did not take part" in reason
        else "dead",  # type: ignore[arg-type]
        why="exception",
        root_cause=True,
        culprits=[],
        victims=ranks,
        confidence="medium",
        summary=f"strict verification refused a call on {ranks_phrase(ranks)}: {reason}",
        explanation=f"It was {operation.strip()}",
        next_step="compare the arguments with which these ranks make this call",
        evidence=[f"rank {rank} {views[rank].exit.text}." for rank in ranks[:4]],
        would_raise_confidence="The exception's whole text is in the output of these ranks.",
    )


def _ended_early(
    context: Context, ended: list[int], teller: RankView, victims: list[int]
) -> Finding:
    """Return the finding for ranks of which the refusals say that they had ended, while nobody saw
    how.
    """
    known = [rank for rank in ended if rank in context.job.views]
    op = teller.last_op
    meeting = f" {op_phrase(op)}" if op is not None else " a call of the others"
    return Finding(
        kind="dead",
        why=(
            "finished"
            if known and context.job.views[known[0]].exit.kind in ("leaving", "clean")
            else "unknown"
        ),
        root_cause=True,
        culprits=ended,
        victims=victims,
        confidence="medium",
        summary=(
            f"{ranks_and_verb(ended, 'ended', 'ended')} without{meeting}; strict verification"
            f" refused it on {ranks_phrase(victims)}"
        ),
        explanation=prose(
            *(
                f"{phrases.name(context, rank)} {context.job.views[rank].exit.text};"
                f" {phrases.last(context, rank)}."
                for rank in known[:2]
            )
        ),
        next_step=f"look at the end of the output of {ranks_phrase(ended)}",
        evidence=[f"rank {rank} {context.job.views[rank].exit.text}." for rank in victims[:4]],
        would_raise_confidence="Only the refusals tell it: nobody saw how it ended.",
    )


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
