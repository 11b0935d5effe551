"""The pipeline stages of a job, inferred from its point-to-point messages. Stages do different
things by design.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from commlens.model.grouping import grouped
from commlens.model.trace import TraceData
from commlens.traces import wording

Edges = Counter[tuple[int, int]]  # number of messages by sender and receiver


def find_stages(by_rank: Mapping[int, TraceData]) -> list[list[int]]:
    """Return the ranks of each pipeline stage, first stage first; one list with all ranks if there
    is no pipeline.

    Ranks form a pipeline if their messages on one group go to neighbours only, and not evenly
    around a ring, as in context parallelism: the first stage receives no activations. Ranks at the
    same position of their pipelines are one stage.
    """
    positions: dict[int, list[tuple[str, int]]] = {rank: [] for rank in by_rank}
    for label, edges in _messages(by_rank).items():
        for ranks in _components(edges):
            if _is_pipeline(ranks, edges, by_rank, label):
                for position, rank in enumerate(ranks):
                    if rank in positions:
                        positions[rank].append((label, position))
    stages = grouped((tuple(sorted(where)), rank) for rank, where in positions.items())
    return [stages[where] for where in sorted(stages)]


def _messages(by_rank: Mapping[int, TraceData]) -> dict[str, Edges]:
    """Count the messages on each group, by its label; each as its sender saw it, or its receiver if
    the sender has no trace.
    """
    found: dict[str, Edges] = defaultdict(Counter)
    for rank, data in by_rank.items():
        for event in data.events:
            if event.op == "send" and event.peer is not None:
                found[wording.label(data.group_of(event))][rank, event.peer] += event.count
            elif event.op == "recv" and event.peer is not None and event.peer not in by_rank:
                found[wording.label(data.group_of(event))][event.peer, rank] += event.count
    return found


def _components(edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the sets of ranks that messages connect, each in order."""
    together: dict[int, set[int]] = {}
    for one, other in edges:
        joined = together.get(one, {one}) | together.get(other, {other})
        together.update(dict.fromkeys(joined, joined))
    return [sorted(ranks) for ranks in {id(ranks): ranks for ranks in together.values()}.values()]


def _is_pipeline(
    ranks: list[int], edges: Edges, by_rank: Mapping[int, TraceData], label: str
) -> bool:
    size = len(ranks)
    if size == 2:  # two ranks cannot show whether they are a line or a ring, except by who begins
        begin = {_first_message(by_rank[rank], label) for rank in ranks if rank in by_rank}
        return begin == {"send", "recv"}
    at = {rank: position for position, rank in enumerate(ranks)}
    # by distance: messages from each position
    steps: dict[int, list[int]] = defaultdict(lambda: [0] * size)
    for (sender, receiver), calls in edges.items():
        if sender in at:
            steps[(at[receiver] - at[sender]) % size][at[sender]] += calls
    return set(steps) <= {1, size - 1} and any(len(set(calls)) > 1 for calls in steps.values())


def _first_message(data: TraceData, label: str) -> str | None:
    return next(
        (
            event.op
            for event in data.events
            if event.op in ("send", "recv") and wording.label(data.group_of(event)) == label
        ),
        None,
    )
