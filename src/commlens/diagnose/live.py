"""What the records alone say while a job runs: ranks that disagree, or are out of step. Nothing here is about waiting."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnose.choose import choose
from commlens.diagnose.context import Context
from commlens.diagnose.disagreements import find_disagreements
from commlens.diagnose.graph import Builder
from commlens.diagnose.mismatch import Trouble, find_troubles
from commlens.diagnose.world import build
from commlens.model.collective import State
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Finding

_NOTHING_STALLS_S = 1e6


def disagreements(logs: Sequence[RankLog]) -> list[Finding]:
    """The ranks that met for different things, in the words of a diagnosis; the first cause first.

    Args:
        logs: the boxes of a running job, as of now.
    """
    return [finding for finding, trouble in _found(logs) if trouble.answer is not None]


def shifts(logs: Sequence[RankLog], *, at_least: int) -> list[Finding]:
    """Ranks that are out of step where shapes agree, told by the lines and steps alone: a warning, never more.

    Args:
        logs: the same.
        at_least: collectives that must agree with it.
    """
    return [
        finding
        for finding, trouble in _found(logs)
        if trouble.answer is None and trouble.shift is not None and trouble.shift.matches >= at_least
    ]


def _found(logs: Sequence[RankLog]) -> list[tuple[Finding, Trouble]]:
    chosen, _ = choose(logs)
    if len(chosen) < 2:
        return []
    world = build(chosen, _NOTHING_STALLS_S)
    troubles = [trouble for trouble in find_troubles(world) if not trouble.uncertain and not _held_back(trouble)]
    if not troubles:
        return []
    context = Context(world, troubles, Builder(world, troubles).build())
    find_disagreements(context, {})
    found = sorted(zip(context.cases, troubles, strict=True), key=lambda pair: pair[0].order)
    return [(case.finding, trouble) for case, trouble in found]


def _held_back(trouble: Trouble) -> bool:
    """Whether the strict verifier has it: it holds these back, or has refused them on every rank."""
    return trouble.refused or any(op.state is State.ANNOUNCED for op in trouble.ops.values())
