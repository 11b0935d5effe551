"""Keys of the job's store that ranks wait for and no rank writes."""

from __future__ import annotations

from collections import defaultdict

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.findings.startup_and_exit import MOTIONLESS
from commlens.diagnosis.graph.store_keys import writes_of_kind
from commlens.diagnosis.graph.wait_graph import Edge, Node
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.phrases import prose
from commlens.model.collective import Collective
from commlens.model.verdict import Finding
from commlens.text import capital, frame_phrase, key_phrase, op_phrase, ranks_and_verb, ranks_phrase

_OTHERS_MAX = 4


def find_skipped_writes(context: Context) -> None:
    """Find the cycles in which ranks wait for a key, and the rank that wrote such keys before waits
    for these ranks.

    That rank is to blame if most of the ranks in the cycle wait for the key. Otherwise these may be
    where they should not be.
    """
    graph, left = context.graph, []
    for component in graph.deadlocks:
        waits = [node for node in component if node.kind == "wait"]
        held = [node for node in waits if graph.blocks[node].op.is_store_wait]
        writers = {target.rank for node in held for target in graph.edges[node]}
        edges = [edge for node in held for edge in graph.edges[node].values()]
        wrote = writes_of_kind(context.job, edges[0].op) if edges else {}
        is_one = (
            len(writers) == 1
            and len({edge.instance for edge in edges}) == 1
            and writers <= wrote.keys()
        )
        if is_one and len(held) > len(waits) - len(held):
            writer = writers.pop()
            _skipped_write(context, writer, wrote[writer], waits, edges)
        else:
            left.append(component)
    graph.deadlocks = left


def _skipped_write(
    context: Context, writer: int, write: Collective, waits: list[Node], edges: list[Edge]
) -> None:
    op, ranks = edges[0].op, sorted({node.rank for node in waits})
    waiting = sorted({edge.rank for edge in edges})
    own = next(context.graph.blocks[node].op for node in waits if node.rank == writer)
    line, place = frame_phrase(write.source) or "an unknown line", frame_phrase(own.source)
    blocked = context.blocked_by(waits)
    finding = Finding(
        kind="missing",
        why="skipped",
        root_cause=True,
        culprits=[writer],
        victims=sorted({*ranks, *blocked} - {writer}),
        confidence="medium",
        summary=(
            f"rank {writer} did not write the {key_phrase(op)};"
            f" {ranks_and_verb(waiting, 'waits', 'wait')} for it in {op.op}"
        ),
        explanation=prose(
            f"{phrases.name(context, writer)} waits for {ranks_phrase(waiting)} in"
            f" {op_phrase(own)}{f' at {place}' if place else ''}.",
            f"It wrote keys like this before, the first one ({write.channel.group.name!r}) at"
            f" {line}.",
            phrases.waiting(context, edges),
            phrases.waiting_behind(context, ranks, blocked),
        ),
        next_step=f"find the branch in which rank {writer} skips {line}",
        would_raise_confidence=(
            "The store itself is not read: whether a process outside of the job writes such keys is"
            " not known."
        ),
    )
    context.add(finding, op, write.source, blocked=len({*ranks, *blocked}))


def find_unwritten(context: Context, nodes: list[Node]) -> None:
    """Find the keys that ranks wait for where the records do not show who should write them. Nobody
    is blamed.

    If all ranks wait like that, a process outside of the job may be meant to write the key, so they
    must have waited for long.
    """
    edges_of = {node: context.graph.edges_into(node) for node in nodes}
    waiting = {edge.rank for edges in edges_of.values() for edge in edges}
    if len(waiting) == context.job.size and not context.waits_too_long(
        waiting, timeouts=MOTIONLESS
    ):
        return
    for node, edges in edges_of.items():
        op, ranks = edges[0].op, sorted({edge.rank for edge in edges})
        blocked = context.blocked_by([node])
        finding = Finding(
            kind="missing",
            why="unknown",
            root_cause=True,
            culprits=[],
            victims=sorted({*ranks, *blocked}),
            confidence="low",
            summary=(
                f"{ranks_and_verb(ranks, 'waits', 'wait')} in {op.op} for the {key_phrase(op)},"
                " which no rank is known to write"
            ),
            explanation=prose(
                phrases.waiting(context, edges),
                phrases.waiting_behind(context, ranks, blocked),
                _others(context, waiting),
            ),
            next_step=(
                f"look for the line that writes the {key_phrase(op)}, and for why no rank has come"
                " there"
            ),
            would_raise_confidence=(
                "The store itself is not read: a process outside of the job may be meant to write"
                " the key."
            ),
        )
        context.add(finding, op, op.source, blocked=len(blocked))


def _others(context: Context, waiting: set[int]) -> str:
    """Say where the ranks are that wait for no key."""
    waits: dict[str, list[int]] = defaultdict(list)  # by op
    doing: dict[str, list[int]] = defaultdict(list)
    for rank, view in context.job.views.items():
        if rank not in waiting:
            block = next(iter(view.blocks.values()), None)
            if block is not None:
                waits[op_phrase(block.op)].append(rank)
            else:
                doing[context.doing(view).phrase].append(rank)
    told = [(ranks, f"{ranks_and_verb(ranks, 'is', 'are')} in {op}") for op, ranks in waits.items()]
    told += [(ranks, f"{ranks_phrase(ranks)} {phrase}") for phrase, ranks in doing.items()]
    parts = [text for _, text in sorted(told)[:_OTHERS_MAX]]
    return f"{capital('; '.join(parts))}." if parts else ""
