"""Ranks that others wait for: those that never arrive, those that visibly work, and those without a
record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from commlens.diagnosis.align.call_paths import Path, part, parted, path_of
from commlens.diagnosis.align.rounds import count_rounds
from commlens.diagnosis.align.routine import ever_leaves_routine
from commlens.diagnosis.causes.context import TOO_LONG, Context, most_waited, op_at
from commlens.diagnosis.findings.stuck_inside import COMPLETION_UNKNOWN
from commlens.diagnosis.graph.wait_graph import Edge, Instance, Node
from commlens.diagnosis.index.activity import Activity, longest_gap_ns
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.next_steps import ended_step, missing_step
from commlens.diagnosis.words.phrases import first_line, prose
from commlens.diagnosis.words.sides import UNDECIDED
from commlens.matching.error_texts import is_refusal
from commlens.model.collective import Collective, State, user_lines
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Confidence, Finding
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    joined,
    key_phrase,
    numbered,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_RECENT = 512  # records in which a line is looked for
_SURE = frozenset({"finished", "stopped", "holding-gil", "throttled", "uninterruptible-io"})
"""Reasons that need no observation over time."""
_WORK = {
    "checkpoint-io": "busy with a checkpoint",
    "compilation": "compiling",
    "initialising": "initialising",
    "data-loading": "loading data",
    "finished": "shutting down",
}
_NO_WORK = {
    "checkpoint-io": "saving or loading",
    "compilation": "compiling",
    "initialising": "initialising",
}
LONGER_THAN_BEFORE = 3  # times the longest time between two collectives


class Absence(NamedTuple):
    """Ranks that do the same thing while others wait for them in one collective."""

    ranks: list[int]
    activities: list[Activity]  # one for each rank
    # the representative wait: of the first rank in the collective in which most ranks wait
    edge: Edge
    edges: list[Edge]  # all waits in that collective
    elsewhere: list[Edge]  # their waits in other collectives
    waiting: list[int]  # ranks that wait in the representative's collective
    blocked: list[int]  # also the ranks that wait elsewhere or behind them

    @property
    def doing(self) -> Activity:
        """The activity, which the ranks share."""
        return self.activities[0]


def find_missing(context: Context, nodes: list[Node]) -> None:
    """Make one finding for all ranks that do the same thing while the same collective waits for
    them.
    """
    groups: dict[tuple[object, ...], list[tuple[Node, Activity]]] = defaultdict(list)
    for node in nodes:
        doing = context.doing(context.job.views[node.rank])
        first = most_waited(context.graph.edges_into(node))
        in_time = (
            doing.works
            and not _is_too_late(doing, first.op)
            and not _is_too_long(context, node, doing)
        )
        groups[(first.instance, in_time, doing.why, doing.frame)].append((node, doing))
    for (_, works, _, _), members in sorted(
        groups.items(), key=lambda item: [m[0] for m in item[1]]
    ):
        absent = [node for node, _ in members]
        edges = [edge for node in absent for edge in context.graph.edges_into(node)]
        edge = most_waited(edges)
        same = [other for other in edges if other.instance == edge.instance]
        absence = Absence(
            [node.rank for node in absent],
            [doing for _, doing in members],
            edge,
            same,
            [other for other in edges if other.instance != edge.instance],
            sorted({other.rank for other in same}),
            context.blocked_by(absent),
        )
        if works:
            _waiting(context, absence, blocked=len(context.blocked_by(absent[:1])))
        else:
            _missing(context, absence)


def _is_too_late(doing: Activity, op: Collective) -> bool:
    """Return whether the wait for a rank is over: strict verification gave up, or it failed while
    the rank was shutting down.
    """
    return is_refusal(op.error) or (doing.why == "finished" and op.state is State.FAILED)


def _is_too_long(context: Context, node: Node, doing: Activity) -> bool:
    """Return whether a rank has worked for so long while others wait that it may never arrive: it
    may be in an endless loop.
    """
    edges = context.graph.edges_into(node)
    if any(context.timed_out(edge) for edge in edges):
        return True
    limit = _patience_ns(context, node.rank, doing)
    return limit is not None and context.longest_wait(edge.rank for edge in edges) >= limit


def _patience_ns(context: Context, rank: int, doing: Activity) -> int | None:
    """Return how long others may wait for a working rank, in ns, before it counts as stuck.

    None: visible compilation, a checkpoint that is being written and a block marked as slow may
    take any time, but not longer than the process group's timeout.
    """
    log = context.job.views[rank].log
    if log.expecting is not None or (
        doing.why in ("compilation", "checkpoint-io") and not doing.unclear
    ):
        return None
    timeouts = 2 * TOO_LONG if doing.unclear else TOO_LONG
    return max(timeouts * context.job.stall_timeout_ns, LONGER_THAN_BEFORE * longest_gap_ns(log))


def _missing(context: Context, absence: Absence) -> None:
    ranks, waiting, doing, op = absence.ranks, absence.waiting, absence.doing, absence.edge.op
    view = context.job.views[ranks[0]]
    finished = doing.why == "finished"
    culprits, decided = _culprits_of_end(context, absence) if finished else (sorted(ranks), [])
    alone, is_tie = culprits == waiting, not culprits
    views = [context.job.views[rank] for rank in culprits]
    if all(each.exit.refused and op_at(each, absence.edge.instance) is None for each in views):
        # strict verification ended their wait elsewhere: what they waited for is the cause
        culprits = []
    frame = op.source if alone else doing.frame
    if frame is None and finished and view.last_op is not None:
        frame = view.last_op.source
    lead = (
        f"Like {ranks_phrase(set(ranks) - {view.rank})}, " if len(ranks) > 1 and not alone else ""
    )
    over = bool(views) and all(each.exit.ended for each in views)
    holders, lock_step = _lock_holders(context, absence)
    evidence = _signs(absence) + holders
    too_long = doing.works and not _is_too_late(doing, op)
    gap = longest_gap_ns(view.log)
    if too_long and gap >= 1_000_000:
        evidence.append(
            f"Before, rank {ranks[0]} spent at most {duration(gap)} between two collectives."
        )
    if finished:
        evidence += _steps_evidence(context, absence) + decided
        if leaving := sorted(
            rank for rank in ranks if context.job.views[rank].exit.kind == "leaving"
        ):
            whose = f"The exit {verb(leaving, 'status', 'statuses')} of {ranks_phrase(leaving)}"
            evidence.append(
                f"{whose} {verb(leaving, 'is', 'are')} not known yet: the launcher reports one that"
                " is not 0."
            )
    elif context.job.knows.stacks:
        evidence += _stack_evidence(view, absence)
    evidence += _failure_evidence(view) + phrases.aborted(context, absence.blocked)
    sure = doing.observed or doing.why in _SURE
    more = None
    if too_long:
        open_question = "waits for a disk or a server" if doing.unclear else "is in an endless loop"
        advice = "commlens.expect_slow marks code that may take this long"
        if context.timed_out(absence.edge):
            advice = "if its work may take this long, give the process group a longer timeout"
        more = f"Whether it {open_question} does not show from outside; {advice}."
    elif not sure and not context.job.knows.stacks:
        more = (
            "A recorder of collectives does not show what a rank does between them; a stack of"
            f" {ranks_phrase(ranks)} (py-spy dump) would."
        )
    elif not sure and any(context.job.views[rank].exit.ended for rank in ranks):
        more = "Whether it made progress was not observed before the job was ended."
    elif not sure:
        more = (
            "Whether it makes progress was not observed: run `commlens dump` on its node, which"
            " watches the process for a moment."
        )
    only_issued = all(
        each.is_log and not each.timed_out for each in (context.job.views[rank] for rank in waiting)
    )
    if only_issued:
        more = (
            "NCCL's lines tell what a rank issued, not what completed: while a job runs, its ranks"
            " are a few collectives apart, too."
        )
    extra, path = _unmatched_line(context, absence) if finished else None, Path(None, "", "")
    if extra is not None:
        frame = extra.source
        path = _path_of_unmatched(context, absence, extra)
        met = context.job.tracks_on(op.channel.key)[ranks[0]].ops.get(extra.sequence_number)
        left = (
            f"{op.op} at {frame_phrase(op.source)}, a line that {ranks_phrase({*ranks, *waiting})}"
            " reach, is left over"
        )
        paired = (
            f"{extra.op} #{extra.sequence_number} of {ranks_phrase(waiting)} met the one at"
            f" {frame_phrase(met.source)}; "
            if met
            else ""
        )
        evidence.insert(0, f"{paired}{left}.")
    certain = (
        sure and (not alone or extra is not None) and not is_tie and not context.assumed(waiting)
    )
    unknown = context.completion_unknown(waiting)
    if unknown:
        more = (
            f"Whether {ranks_phrase(waiting)} wait at all is inferred from their stacks:"
            f" {COMPLETION_UNKNOWN}"
        )
    unsure = too_long or only_issued or unknown or not (culprits or is_tie)
    confidence: Confidence = "low" if unsure else "high" if certain else "medium"
    if confidence != "high" and more is None:
        more = _why_unsure(absence, is_tie=is_tie, alone=alone, refused=not (culprits or is_tie))
    finding = Finding(
        kind="missing",
        why=doing.why,
        root_cause=True,
        culprits=culprits,
        victims=sorted(set(absence.blocked) - set(culprits)),
        confidence=confidence,
        summary=(
            _unmatched_summary(absence, extra, path)
            if extra is not None
            else _summary(context, absence, alone)
        ),
        explanation=prose(
            f"{lead}{phrases.name(context, ranks[0])} {doing.phrase};"
            f" {phrases.last(context, ranks[0])}.",
            *_waits(context, absence),
        ),
        next_step=(
            ended_step(extra, ranks, waiting, path.with_caller)
            if extra is not None
            else (
                ended_step(op, ranks, waiting)
                if finished
                and not (op.is_setup or op.is_store_wait)
                and _is_first_of_its_line(context, absence.edge)
                else lock_step
                or missing_step(doing, culprits or sorted([*ranks, *waiting]), op, ended=over)
            )
        ),
        evidence=evidence,
        would_raise_confidence=more,
        certain=all(context.job.views[rank].exit.kind == "clean" for rank in ranks) and not unknown,
    )
    context.add(finding, extra or op, frame, blocked=len(absence.blocked))


def _why_unsure(absence: Absence, *, is_tie: bool, alone: bool, refused: bool) -> str:
    """Return the reason for a confidence that is not high, where nothing else limits it."""
    if refused:
        return (
            "Strict verification ended their waits elsewhere first, and what they waited for is not"
            " in these records."
        )
    if is_tie:
        return (
            "A run with more steps before the fault would show which side departs from its routine."
        )
    if alone:
        return (
            f"That {ranks_phrase(absence.ranks)} are right is an assumption: most ranks finished."
        )
    return (
        f"That {ranks_and_verb(absence.waiting, 'waits', 'wait')} is inferred: an op is in flight,"
        " but no thread was seen in a wait."
    )


def _unmatched_line(context: Context, absence: Absence) -> Collective | None:
    """Return the first collective from the line that only the waiting ranks reach, or reach more
    often, if it is not where they wait.

    Collectives of one op pair up in order, wherever they are issued. So the one that is left over
    comes from a line that all ranks reach, and the one too many met another line's.
    """
    op = absence.edge.op
    if op.is_point_to_point or op.is_setup or op.is_store_wait:
        return None
    tracks = context.job.tracks_on(op.channel.key)
    both = (absence.waiting, absence.ranks)
    if any(
        rank not in tracks or context.job.views[rank].wrapped for ranks in both for rank in ranks
    ):
        return None
    going, ended = (
        [Counter((one.op, one.call_lines) for one in tracks[rank].ops.values()) for rank in ranks]
        for ranks in both
    )
    if any(each != going[0] for each in going) or any(each != ended[0] for each in ended):
        return None
    more = going[0] - ended[0]
    if (
        len(more) != 1
        or ended[0] - going[0]
        or (op.op, op.call_lines) in more
        or any(not lines for _, lines in more)
    ):
        return None
    own = tracks[absence.edge.rank].ops
    reached = [number for number in sorted(own) if (own[number].op, own[number].call_lines) in more]
    return own[reached[len(reached) - more.total()]]


def _unmatched_summary(absence: Absence, extra: Collective, path: Path) -> str:
    alone = f"{ranks_phrase(absence.waiting)} alone issued {op_phrase(extra)} at {path.place}"
    waits = ranks_and_verb(absence.waiting, "waits", "wait")
    return (
        f"{alone}; what follows pairs up wrongly, and {waits} in #{absence.edge.op.sequence_number}"
        " when the others have finished"
    )


def _path_of_unmatched(context: Context, absence: Absence, extra: Collective) -> Path:
    """Return the path to a line that only the waiting ranks reach, from where it leaves the others'
    path to what it met there.
    """
    rank, other = absence.edge.rank, absence.ranks[0]
    met = context.job.tracks_on(extra.channel.key)[other].ops.get(extra.sequence_number)
    return part(context.job, rank, extra, other, met)[0] if met is not None else path_of(extra)


def _culprits_of_end(context: Context, absence: Absence) -> tuple[list[int], list[str]]:
    """Return the ranks that did a round too few or too many, of those that finished and those that
    wait for them, and the evidence.

    The majority of the group decides; else how often all ranks of the job came to these lines; else
    the ranks' routine.
    """
    ranks, waiting, op = sorted(absence.ranks), absence.waiting, absence.edge.op
    if op.is_setup or op.is_store_wait:
        return ranks, []
    both = {*ranks, *waiting}
    tracks = context.job.tracks_on(op.channel.key)
    got_to = max((tracks[rank].last for rank in ranks if rank in tracks), default=0)
    # a rooted collective can complete without the others
    further = [rank for rank, track in tracks.items() if track.last > got_to]
    if not op.is_point_to_point and max(len(ranks), len(further)) * 2 > len(op.channel.group.ranks):
        fewer = waiting if len(further) < len(ranks) else ranks
        all_rounds = count_rounds(context.job, op)
        if len(op.channel.group.ranks) == context.job.size or (
            all_rounds is not None and not all_rounds.odd.isdisjoint(fewer)
        ):
            return fewer, []
    told = [
        rounds
        for each in (op, _other_side(context, absence))
        if each is not None and (rounds := count_rounds(context.job, each))
    ]
    odd = both.intersection(*[rounds.odd for rounds in told]) if told else set()
    if odd and odd != both:
        return sorted(odd), [told[0].phrase]
    leaving = [
        side
        for side in (ranks, waiting)
        if any(ever_leaves_routine(context.job.views[rank]) for rank in side)
    ]
    return (leaving[0], []) if len(leaving) == 1 else ([], [UNDECIDED])


def _other_side(context: Context, absence: Absence) -> Collective | None:
    """Return the last message of a rank that finished in the direction of the one that a rank waits
    for.
    """
    op, view = absence.edge.op, context.job.views[absence.ranks[0]]
    back = "recv" if op.op == "send" else "send"
    return (
        view.pairs.get((op.channel.key, absence.edge.rank, back), [None])[-1]
        if op.is_point_to_point
        else None
    )


def _summary(context: Context, absence: Absence, alone: bool) -> str:
    ranks, waiting, op = absence.ranks, absence.waiting, absence.edge.op
    name, them = op_phrase(op), verb(ranks, "it", "them")
    if alone and op.is_point_to_point:
        return (
            f"{ranks_phrase(waiting)} {verb(waiting, 'waits', 'wait')} in {name}, but"
            f" {ranks_phrase(ranks)} has finished, like most ranks"
        )
    if alone:
        return (
            f"{ranks_and_verb(waiting, 'issues', 'issue')} {name}, but"
            f" {ranks_and_verb(ranks, 'has', 'have')} finished"
        )
    if op.is_store_wait:
        did = (
            "finished without writing"
            if absence.doing.why == "finished"
            else f"{verb(ranks, 'has', 'have')} not written"
        )
        return (
            f"{ranks_phrase(ranks)} {did} the {key_phrase(op)};"
            f" {ranks_and_verb(waiting, 'waits', 'wait')} for it in {op.op}"
        )
    if op.is_point_to_point:
        message = numbered("message" if op.sequence_number else "the message", op.sequence_number)
        did = f"sent {message} to" if op.op == "recv" else f"received {message} from"
        return f"{ranks_phrase(ranks)} never {did} rank {absence.edge.rank}, which waits for it"
    if absence.doing.why != "finished" and all(
        op_at(context.job.views[rank], absence.edge.instance) is not None for rank in ranks
    ):
        return (
            f"{ranks_phrase(ranks)} reached {name} after {ranks_phrase(waiting)} had given up"
            f" waiting for {them}"
        )
    did = "finished without" if absence.doing.why == "finished" else "never reached"
    wait = f"{ranks_and_verb(waiting, 'waits', 'wait')} for {them}"
    if context.timed_out(absence.edge):
        wait = f"{ranks_phrase(waiting)} waited for {them} until the timeout"
    return f"{ranks_phrase(ranks)} {did} {name}; {wait}"


def _waiting(context: Context, absence: Absence, blocked: int) -> None:
    ranks, waiting, doing, op = absence.ranks, absence.waiting, absence.doing, absence.edge.op
    held = sorted(set(absence.blocked) - set(ranks))
    expecting = context.job.views[ranks[0]].log.expecting
    subject, waits = ranks_phrase(ranks), ranks_and_verb(waiting, "waits", "wait")
    work = (
        f"in a block marked as slow ({expecting})"
        if expecting is not None
        else _WORK.get(doing.why, "working")
    )
    if doing.unclear:
        where = _NO_WORK.get(doing.why, "sending data that nobody takes")
        work = f"{where} and {verb(ranks, 'shows', 'show')} no work"
    waited = context.longest_wait(waiting)
    patience = _patience_ns(context, ranks[0], doing)
    limit = (
        f"{capital(ranks_and_verb(ranks, 'counts', 'count'))} as stuck if that lasts"
        f" {duration(patience)}."
        if patience
        else ""
    )
    finding = Finding(
        kind="waiting",
        why=doing.why,
        root_cause=False,
        culprits=[],
        victims=held,
        confidence="low" if doing.unclear else "high" if doing.observed else "medium",
        summary=f"{waits} in {op_phrase(op)} for {subject}, which {verb(ranks, 'is', 'are')} {work}"
        + (f", {duration(waited)} so far" if waited else "")
        + (": the reason is unknown" if doing.unclear else ""),
        explanation=prose(
            f"{phrases.name(context, ranks[0])} {doing.phrase}; {phrases.last(context, ranks[0])}.",
            *_waits(context, absence),
            limit,
        ),
        next_step=(
            f"wait; if {subject} should not take this long, look at {frame_phrase(doing.frame)}"
            if doing.frame
            else "wait"
        ),
        evidence=_signs(absence),
        would_raise_confidence=(
            "Nothing shows work or a fault: it may wait for a disk or a server."
            if doing.unclear
            else (
                None
                if doing.observed
                else "It was not watched for long enough to see that it moves."
            )
        ),
    )
    context.add(finding, op, doing.frame, blocked=blocked)


def _waits(context: Context, absence: Absence) -> list[str]:
    """Return sentences about the ranks that wait: in the representative's collective, elsewhere,
    and behind these.
    """
    them = verb(absence.ranks, "it", "them")
    others = phrases.waits(context, absence.elsewhere, f"waits for {them}", f"wait for {them}")
    direct = {*absence.waiting, *(edge.rank for edge in absence.elsewhere)}
    return [
        phrases.waiting(context, absence.edges),
        f"{capital(others)}." if others else "",
        phrases.waiting_behind(context, sorted(direct), set(absence.blocked) - set(absence.ranks)),
    ]


def _signs(absence: Absence) -> list[str]:
    """``"rank 2: its stack does not move and it uses no CPU."``; ranks with the same signs share a
    sentence: ``"ranks 2-3, each: ..."``.
    """
    same: dict[str, list[int]] = defaultdict(list)
    for rank, doing in zip(absence.ranks, absence.activities, strict=True):
        if doing.signs:
            same[joined(doing.signs)].append(rank)
    return [
        f"{ranks_phrase(ranks)}{verb(ranks, '', ', each')}: {text}." for text, ranks in same.items()
    ][:4]


def _lock_holders(context: Context, absence: Absence) -> tuple[list[str], str]:
    """Name the ranks that hold the locks that the absent ones wait for. Return sentences, and a
    next step if they wait for each other.
    """
    said, step = [], ""
    for rank in absence.ranks:
        log = context.job.views[rank].log
        pid = log.observation.waits_for_pid
        views = context.job.views.values() if pid else ()
        holder = next(
            (one for one in views if (one.log.pid, one.log.host) == (pid, log.host)), None
        )
        if holder is None:
            continue
        edge = next(
            (edge for edge in (*absence.edges, *absence.elsewhere) if edge.rank == holder.rank),
            None,
        )
        if edge is None:
            said.append(f"Process {pid} is rank {holder.rank}.")
            continue
        said.append(
            f"Process {pid} is rank {holder.rank}, which waits for rank {rank} in"
            f" {op_phrase(edge.op)}: neither can go on."
        )
        step = (
            f"release the lock on rank {holder.rank} before {edge.op.op} at"
            f" {frame_phrase(edge.op.source) or 'an unknown line'}"
        )
    return said, step


def _steps_evidence(context: Context, absence: Absence) -> list[str]:
    """``"rank 2 did 7 optimizer steps in all, 1 fewer than ranks 0-1,3 so far."``; nothing where
    ranks differ or count none.
    """
    ended, going = (
        {context.job.views[rank].log.steps for rank in ranks}
        for ranks in (absence.ranks, absence.waiting)
    )
    if len(ended) != 1 or len(going) != 1 or not max(ended):
        return []
    did, fewer = max(ended), max(going) - max(ended)
    than = f"{abs(fewer)} {'fewer' if fewer > 0 else 'more'} than" if fewer else "as many as"
    return [
        f"{ranks_phrase(absence.ranks)} did {count(did, 'optimizer step')} in all, {than}"
        f" {ranks_phrase(absence.waiting)} so far."
    ]


def _is_first_of_its_line(context: Context, edge: Edge) -> bool:
    """Return whether a waiting rank issued nothing from this line before, so that it is not one
    more iteration.
    """
    view, op = context.job.views[edge.rank], edge.op
    if op.is_point_to_point or op.source is None or view.wrapped:
        return False
    return not view.has_been_at(op, among_last=_RECENT)


def _stack_evidence(view: RankView, absence: Absence) -> list[str]:
    stack = view.log.main_stack
    if stack is None:
        note = view.log.observation.stacks_note
        return [f"There is no stack of rank {view.rank}" + (f": {note}." if note else ".")]
    op = absence.edge.op
    paths = (
        parted(stack.frames, op.stack)
        if stack.source is not None and stack.source == op.source
        else None
    )
    if paths is not None:  # a trainer's call, or a helper: the line is the same on all ranks
        return [
            f"rank {view.rank} is in {paths[0].phrase}, {ranks_phrase(absence.waiting)} in"
            f" {paths[1].phrase}."
        ]
    first, *callers = [frame_phrase(frame) for frame in user_lines(stack.frames)][:4] or [""]
    return (
        [f"{first} on rank {view.rank} was called by {', called by '.join(callers)}."]
        if callers
        else []
    )


def _failure_evidence(view: RankView) -> list[str]:
    failed = next((op for op in view.log.collectives[-1:] if op.state is State.FAILED), None)
    if failed is None or not failed.error:
        return []
    return [f"rank {view.rank}: {op_phrase(failed)} failed with {first_line(failed.error)}."]


def find_unrecorded(context: Context, nodes: list[Node]) -> None:
    """Presume ranks without a record on this node dead; those of another node, or with damaged
    records, may be anywhere.
    """
    others = any(case.finding.root_cause for case in context.cases)
    # Where a dump could not be read, its rank may as well be the one that holds up the others as
    # one without a dump.
    unknown = not context.job.knows.every_process and any(
        node.rank in context.job.views for node in nodes
    )
    groups: dict[tuple[Instance, str, str], list[Node]] = defaultdict(list)
    # by the collectives whose ranks wait for a node: for many nodes the same
    instances: dict[frozenset[Node], Instance] = {}
    for node in nodes:
        sources = frozenset(context.graph.waiters.get(node, ()))
        sources = sources if all(source.kind == "at" for source in sources) else frozenset({node})
        if sources not in instances:
            instances[sources] = most_waited(context.graph.edges_into(node)).instance
        stranger = context.job.strangers.get(node.rank)
        view = context.job.views.get(node.rank)
        why = (
            stranger.unrecorded
            if stranger is not None
            else ""
            if view is None
            else "silent"
            if view.is_log
            else "damaged"
        )
        why = "silent" if context.job.only_logs else why
        # a line that could not be read may tell it
        why = "damaged" if view is not None and view.is_log and view.lost_newest else why
        groups[(instances[sources], node.kind, why)].append(node)
    for (_, kind, why), members in sorted(groups.items()):
        edges = context.graph.edges_into(members[0])
        ranks, waiting = [node.rank for node in members], sorted({edge.rank for edge in edges})
        dead = kind == "no-record" and not why and not unknown
        if why == "silent":
            _silent(context, ranks, edges, context.blocked_by(members), others=others)
            continue
        _unrecorded(
            context, ranks, waiting, edges, context.blocked_by(members), dead=dead, others=others
        )


def _silent(
    context: Context, ranks: list[int], edges: Sequence[Edge], blocked: list[int], *, others: bool
) -> None:
    """Report ranks of which no line of a log tells that they came to the collective in which the
    others timed out.

    The watchdog of a rank that waited as well would have told it, unless it could not run. So a
    single such rank is the suspect.
    """
    views = context.job.views
    known = [rank for rank in ranks if rank in views]
    stuck_s = max((views[rank].columns.dump.stuck_watchdog_s for rank in known), default=0)  # type: ignore[union-attr] # of logs
    subject, op = ranks_phrase(ranks), most_waited(edges).op
    cause = (
        f"no line tells that {subject} came to it" if known else f"there is no line of {subject}"
    )
    why = (
        f"If {verb(ranks, 'it has', 'they have')} not come to it,"
        f" {verb(ranks, 'it holds', 'they hold')} up the others."
    )
    step = f"look at the output of {subject}, from the time when the others came to {op.op} on"
    if stuck_s:
        cause = (
            f"{subject} did not, because {verb(ranks, 'its', 'their')} NCCL watchdog was stuck for"
            f" {duration(stuck_s * 1_000_000_000)}"
        )
        why = (
            "A watchdog gets stuck if a CUDA call does not return or a thread holds the GIL:"
            f" {subject} stood outside of the collective."
        )
        step = (
            f"take a stack of {subject} (py-spy dump --native): a CUDA call does not return there,"
            " or a thread holds the GIL"
        )
    ends = [f"Rank {rank} {views[rank].exit.text}." for rank in known if views[rank].exit.ended]
    they_wait = phrases.waits(
        context, edges, *(["timed out"] * 2 if context.job.only_logs else ["waits", "wait"])
    )
    finding = Finding(
        kind="missing",
        why="unknown",
        root_cause=not others,
        culprits=ranks if len(ranks) == 1 else [],
        victims=sorted({*blocked} - {*ranks}),
        confidence="medium" if stuck_s and len(ranks) == 1 else "low",
        summary=f"{they_wait}; {cause}",
        explanation=prose(why, *ends),
        next_step=step,
        evidence=phrases.aborted(context, blocked),
        would_raise_confidence=(
            "A stack, or a dump of the Flight Recorder, would show where"
            f" {verb(ranks, 'it', 'they')} stood."
        ),
    )
    context.add(finding, op, None, blocked=len(blocked))


def _unrecorded(
    context: Context,
    ranks: list[int],
    waiting: list[int],
    edges: Sequence[Edge],
    blocked: list[int],
    *,
    dead: bool,
    others: bool,
) -> None:
    op = most_waited(edges).op
    subject, they_wait = ranks_phrase(ranks), phrases.waits(context, edges, "waits", "wait")
    strangers = [context.job.strangers[rank] for rank in ranks if rank in context.job.strangers]
    confidence: Confidence = "medium" if dead else "low"
    why, more = (
        prose(phrases.waiting(context, edges), phrases.waiting_behind(context, waiting, blocked)),
        f"What {subject} did last is not recorded.",
    )
    if strangers:
        pids = joined([f"pid {log.pid}" for log in strangers[:8]])
        runs = verb(ranks, "runs on this node but is", "run on this node but are")
        summary = (
            f"{subject} ({pids}) {runs} not recorded; {they_wait} for {verb(ranks, 'it', 'them')}"
        )
        step = (
            f"take a stack of {verb(ranks, 'it', 'them')} (py-spy dump --pid {strangers[0].pid});"
            f" {strangers[0].unrecorded}"
        )
    elif ranks[0] in context.job.views and context.job.views[ranks[0]].is_older_than(
        op.announced_ns
    ):
        them, dumps = verb(ranks, "it", "them"), verb(ranks, "dump", "dumps")
        summary = (
            f"{they_wait}; the {dumps} of {subject} {verb(ranks, 'is', 'are')} older and"
            f" {verb(ranks, 'does', 'do')} not show "
        )
        summary += f"whether {verb(ranks, 'it', 'they')} came"
        step = (
            "dump all ranks at one moment while the job hangs, and diagnose these dumps; or take a"
            f" stack of {them} (py-spy dump)"
        )
    elif ranks[0] in context.job.views:
        pid = context.job.views[ranks[0]].log.pid
        summary = f"{they_wait}; the newest records of {subject} are unreadable"
        step = f"take a stack of {subject} (py-spy dump{f' --pid {pid}' if pid else ''})"
        if not context.job.knows.stacks:
            step = (
                f"look for {verb(ranks, 'a whole copy of the dump', 'whole copies of the dumps')}"
                f" of {subject}, or {step}"
            )
    elif dead:
        summary = f"{subject} left no record; {they_wait} for {verb(ranks, 'it', 'them')}"
        ended = "it ended before it could record anything, or its black box is lost"
        if len(ranks) > 1:
            ended = "they ended before they could record anything, or their black boxes are lost"
        step = f"look at the output of {subject}: {ended}"
    elif op.op == "init_process_group":
        size, here = len(op.channel.group.ranks), context.job.meets_here
        why, origin = (
            phrases.waiting(context, edges),
            _origin_of_size(context.job.views[waiting[0]].log, op),
        )
        started = (
            f"start {subject}, or correct the number of ranks{f': {origin}' if origin else ''}"
        )
        summary = (
            f"{they_wait} for {size} ranks, like all with a record; there is no record of {subject}"
        )
        step = (
            f"{started}; if {verb(ranks, 'it was', 'they were')} started on another node, dump that"
            " node too (`commlens dump`)"
        )
        if here:
            summary = (
                f"{subject} of {size} {verb(ranks, 'was', 'were')} never started: {they_wait} for"
                f" {verb(ranks, 'it', 'them')}"
            )
            step, confidence = started, "medium"
            why = prose(
                why,
                f"All ranks meet at {here}, so they must be on this machine, where only"
                f" {ranks_phrase(waiting)} came.",
            )
            more = (
                f"A process of {subject} that has not loaded torch yet would leave no record"
                " either."
            )
    else:
        summary = f"{they_wait}, like all ranks with a record; there is no record of {subject}"
        step = (
            f"dump the node of {subject} too (`commlens dump`), and diagnose all nodes' dumps"
            " together"
        )
    culprits = ranks if dead or (len(ranks) == 1 and ranks[0] not in context.job.views) else []
    finding = Finding(
        kind="dead" if dead else "missing",
        why="unknown",
        root_cause=(dead and context.job.knows.every_process) or not others,
        culprits=culprits,
        victims=sorted(set(blocked) - set(culprits)),
        confidence=confidence,
        summary=summary,
        explanation=why,
        next_step=step,
        would_raise_confidence=more,
    )
    context.add(finding, op, None, blocked=len(blocked))


def _origin_of_size(log: RankLog, op: Collective) -> str:
    """Say where the number of ranks comes from: the launcher, the environment, or the call; empty
    if that is not recorded.
    """
    size, known = len(op.channel.group.ranks), log.size_in_environment
    if known is None:
        return ""
    if known == size:
        where = (
            f"the options of {log.launcher}"
            if log.launcher in ("torchrun", "mpirun")
            else "the variable WORLD_SIZE"
        )
        return f"{size} comes from {where}"
    line = frame_phrase(op.source)
    but = f", although WORLD_SIZE is {known}" if known else ""
    return (
        f"{size} comes from world_size in the call of"
        f" init_process_group{f' at {line}' if line else ''}{but}"
    )
