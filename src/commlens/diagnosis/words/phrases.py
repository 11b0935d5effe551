"""Phrases about ranks, waits and collectives that several kinds of findings share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.graph.wait_graph import Edge
from commlens.diagnosis.words.exits import exit_words
from commlens.model.collective import Collective, State
from commlens.text import (
    args_phrase,
    capital,
    count,
    duration,
    frame_phrase,
    message_phrase,
    number_named,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    sentence,
    verb,
)

COMPLETION_UNKNOWN = (
    "torch's own recorder is off (TORCH_FR_BUFFER_SIZE=0, or a torch before 2.8),"
    " TORCH_NCCL_BLOCKING_WAIT hides the collectives from it, or they are in a CUDA graph."
)

_WAITS_MAX = 3  # collectives in which ranks wait
_EXITS_MAX = 4  # ranks whose exits a finding lists


def name(context: Context, rank: int) -> str:
    """``"rank 2 (host n03, pid 4121)"``."""
    log = context.job.views[rank].log
    about = [f"host {log.host}"] if log.host else []
    about += [f"pid {log.pid}"] if log.pid else []
    return f"rank {rank}" + (f" ({', '.join(about)})" if about else "")


def last(context: Context, rank: int) -> str:
    """``"its last collective, all_reduce #40 of group dp [0-3], completed"``."""
    view = context.job.views[rank]
    op = view.last_op
    if op is None and view.is_log and view.columns is not None and not view.columns.dump.status:
        return "its log tells no collective"
    if op is None:
        return (
            "it never issued a collective"
            if context.job.knows.completed_ops
            else "it has nothing in flight"
        )
    completed = "completed" if not view.is_log else "was issued"
    states = {State.COMPLETED: completed, State.FAILED: "failed", State.UNKNOWN: "was issued"}
    return f"its last collective, {op_phrase(op)}, {states.get(op.state, 'is in flight')}"


def waiting(context: Context, edges: Sequence[Edge]) -> str:
    """``"Ranks 0-1,3 have been waiting for 31 s at train.py:81 step, float32[1048576] SUM."``;
    lines that differ are listed.
    """
    by_line: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    reduce_ops = {(edge.op.op, edge.op.args.reduce_op) for edge in edges if edge.op.args.reduce_op}
    # a rank decodes its reduce ops some time after it issues them
    known = dict(reduce_ops) if len(reduce_ops) == 1 else {}
    for edge in edges:
        args = args_phrase(edge.op, known.get(edge.op.op))
        by_line[frame_phrase(edge.op.source), args, edge.op.state is State.FAILED].append(edge.rank)
    same_args = len({args for _, args, _ in by_line}) == 1
    parts = []
    for (line, args, failed), ranks in sorted(
        by_line.items(), key=lambda item: (-number_named(item[1]), item[1])
    )[:3]:
        waited = context.longest_wait(ranks)
        length = (
            f" for {duration(waited)}" if waited >= max(context.job.stalled_after_ns, 1) else ""
        )
        about = (f" at {line}" if line else "") + (f", {args}" if args and not same_args else "")
        waits = f"{verb(ranks, 'has', 'have')} been waiting"
        if context.job.foreseen:
            waits = verb(ranks, "waits", "wait")
        did = "waited" if failed else waits
        parts.append(f"{ranks_phrase(ranks)} {did}{length}{about}{', until it failed' * failed}")
    args = next(args for _, args, _ in by_line)
    return prose(
        capital("; ".join(parts)) + (f", {args}." if args and same_args else "."),
        _hosts(context, edges),
    )


def _hosts(context: Context, edges: Sequence[Edge]) -> str:
    """``"Their hosts ran ahead: rank 0 stands at train.py:90 log, rank 2 at train.py:57
    load_batch."``; empty if none did.
    """
    by_line: dict[str, list[int]] = defaultdict(list)
    for rank, op in {edge.rank: edge.op for edge in edges if edge.op.channel.runs_ahead}.items():
        stack = context.job.views[rank].log.main_stack
        frame = stack.source if stack is not None else None
        if (
            frame is not None
            and frame != op.source
            and not (stack is not None and stack.taken_ns and stack.taken_ns < op.announced_ns)
        ):
            by_line[frame_phrase(frame)].append(rank)
    if not by_line:
        return ""
    lines = sorted(by_line.items(), key=lambda item: (-number_named(item[1]), item[1]))[:3]
    if len(lines) == 1:
        line, ranks = lines[0]
        return (
            f"The {verb(ranks, 'host', 'hosts')} of {ranks_phrase(ranks)} ran ahead and"
            f" {verb(ranks, 'stands', 'stand')} at {line}."
        )
    (line, ranks), *others = lines
    said = [
        f"{ranks_and_verb(ranks, 'stands', 'stand')} at {line}",
        *(f"{ranks_phrase(ranks)} at {line}" for line, ranks in others),
    ]
    return f"The hosts ran ahead: {', '.join(said)}."


def aborted(context: Context, ranks: Iterable[int]) -> list[str]:
    """Return a sentence about those of some ranks that NCCL's watchdog aborted; none if there
    are none.
    """
    views = context.job.views
    gone = [rank for rank in sorted(ranks) if rank in views and views[rank].exit.gave_up]
    if not gone:
        return []
    return [f"{capital(ended_like_the_first(context, gone))}."]


def ended_like_the_first(context: Context, ranks: Sequence[int]) -> str:
    """``"ranks 1-3 were ended by SIGTERM"``."""
    return f"{ranks_phrase(ranks)} {exit_words(context.job.views[ranks[0]].exit, ranks)}"


def exits_alike(context: Context, ranks: Iterable[int]) -> list[str]:
    """``["ranks 0-1 died of SIGABRT", ...]``: ranks that ended in the same way share a phrase."""
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_text[exit_words(context.job.views[rank].exit)].append(rank)
    return [f"{ranks_phrase(alike)} {text}" for text, alike in by_text.items()]


def exits(context: Context, ranks: Sequence[int]) -> list[str]:
    """``["rank 1 exited with status 3.", ...]``, for the first few ranks."""
    return [
        sentence(f"rank {rank} {exit_words(context.job.views[rank].exit)}")
        for rank in ranks[:_EXITS_MAX]
    ]


def waiting_behind(context: Context, ranks: Sequence[int], blocked: Iterable[int]) -> str:
    """``"Ranks 4-7 wait behind them."``, for the blocked ranks that are not among ``ranks``;
    empty if there are none.
    """
    more = sorted(set(blocked) - set(ranks))
    return (
        f"{capital(ranks_and_verb(more, 'waits', 'wait'))} behind {verb(ranks, 'it', 'them')}."
        if more
        else ""
    )


def waits(context: Context, edges: Sequence[Edge], singular: str, plural: str) -> str:
    """``"ranks 0,3 wait for it in all_reduce #7 of group tp [0-3], rank 5 in recv #1 from rank
    2"``: each rank in its own collective.

    Args:
        context: the job.
        edges: the waits. Groups of one name share a phrase, and so do messages of one number to
            several peers.
        singular: the verb for one rank: "waits for it".
        plural: the verb for several.
    """
    by_name: dict[tuple[str, int, str, bool], list[Edge]] = defaultdict(list)
    for edge in edges:
        op = edge.op
        by_name[op.op, op.sequence_number, op.channel.group.label, edge.is_from_any].append(edge)
    parts: list[str] = []
    for of_name in sorted(
        by_name.values(), key=lambda some: (-number_named(edge.rank for edge in some), some[0].rank)
    ):
        ranks = sorted({edge.rank for edge in of_name})
        said = f"{ranks_and_verb(ranks, singular, plural)}" if not parts else ranks_phrase(ranks)
        parts.append(f"{said} in {collective_phrase([edge.op for edge in of_name])}")
    more = (
        [f"others in {count(len(parts) - _WAITS_MAX, 'more collective')}"]
        if len(parts) > _WAITS_MAX
        else []
    )
    return ", ".join([*parts[:_WAITS_MAX], *more])


def collective_phrase(ops: Sequence[Collective]) -> str:
    """``"all_reduce #7 of group tp [0-3]"``, for groups of one name ``"... of 4 groups named tp"``;
    ``"send #3 to ranks 4-5"``.
    """
    op, groups = ops[0], {op.channel.key for op in ops}
    if op.is_point_to_point:
        return message_phrase(op, {op.peer for op in ops if op.peer is not None})
    return (
        op_phrase(op)
        if len(groups) == 1
        else f"{op_phrase(op, group=False)} of {len(groups)} groups named {op.channel.group.label}"
    )


def prose(*sentences: str) -> str:
    """Join the sentences that are not empty."""
    return " ".join(filter(None, sentences))


def first_line(error: str) -> str:
    """Return the first line of an error, short and without its full stop."""
    return error.strip().partition("\n")[0][:160].rstrip(". ") or "an error without a message"
