"""What the records alone say while a job runs: ranks that disagree, or are out of step. Nothing here is about waiting."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.alignment import Mismatch, align_records
from commlens.diagnosis.findings.context import Context, locate
from commlens.diagnosis.findings.mismatch import find_mismatches
from commlens.diagnosis.index import World, index_logs
from commlens.diagnosis.select_job import select_job
from commlens.diagnosis.swapped_order import SwappedOrder, find_swapped_orders
from commlens.diagnosis.wait_graph_builder import build_wait_graph
from commlens.model.collective import ChannelKey, State
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding
from commlens.text import capital, frame_phrase, group_phrase, ranks_phrase

_NOTHING_STALLS_S = 1e6


def disagreements(logs: Sequence[RankLog]) -> list[Finding]:
    """The ranks that met for different things, in the words of a diagnosis; the first cause first.

    Args:
        logs: the boxes of a running job, as of now.
    """
    world = _world(logs)
    return [finding for finding, mismatch in _found(world) if mismatch.answer is not None] if world is not None else []


def out_of_step(logs: Sequence[RankLog], *, at_least: int) -> list[Finding]:
    """Ranks that are out of step, or had another order, where ops and shapes agree: told by the lines and steps alone.

    Args:
        logs: the same.
        at_least: collectives that must fit a shift.
    """
    world = _world(logs)
    if world is None:
        return []
    shifts = [
        finding
        for finding, mismatch in _found(world)
        if mismatch.answer is None and mismatch.shift is not None and mismatch.shift.matches >= at_least
    ]
    return shifts or [_swapped(world, key, swap) for key in sorted(world.users) for swap in find_swapped_orders(world, key)]


def _swapped(world: World, key: ChannelKey, swap: SwappedOrder) -> Finding:
    """Another order, in words."""
    first, theirs = swap.own[0], swap.others[0]
    last = swap.number + len(swap.own) - 1
    group = first.channel.group
    others = [rank for rank in sorted(world.users[key]) if rank != swap.rank]
    where = f"{first.op} #{swap.number} to #{last} of {group_phrase(group)}"
    finding = Finding(
        kind="mismatch/op", why="in-collective", root_cause=True, culprits=[swap.rank], victims=others, confidence="medium",
        summary=f"rank {swap.rank} issued {where} in another order than the others: its collective of {frame_phrase(first.source)} "
        f"met the others' collective of {frame_phrase(theirs.source)}",
        explanation=f"Rank {swap.rank}: {', '.join(frame_phrase(op.source) for op in swap.own[:4])}. "
        f"{capital(ranks_phrase(others))}: {', '.join(frame_phrase(op.source) for op in swap.others[:4])}. "
        "Ops and shapes are the same, so nothing hangs: the results are mixed up.",
        next_step=f"find out why rank {swap.rank} reaches {frame_phrase(first.source)} first here",
    )  # fmt: skip
    return locate(finding, first, first.source)


def _world(logs: Sequence[RankLog]) -> World | None:
    chosen, _ = select_job(logs)
    return index_logs(chosen, _NOTHING_STALLS_S) if len(chosen) > 1 else None


def _found(world: World) -> list[tuple[Finding, Mismatch]]:
    mismatches = [mismatch for mismatch in align_records(world) if not mismatch.uncertain and not _held_back(mismatch)]
    if not mismatches:
        return []
    context = Context(world, mismatches, build_wait_graph(world, mismatches))
    find_mismatches(context, {})
    found = sorted(zip(context.cases, mismatches, strict=True), key=lambda pair: pair[0].order)
    return [(case.finding, mismatch) for case, mismatch in found]


def _held_back(mismatch: Mismatch) -> bool:
    """Whether the strict verifier has it: it holds these back, or has refused them on every rank."""
    return mismatch.refused or any(op.state is State.ANNOUNCED for op in mismatch.ops.values())
