"""The verdict on ranks that make a running job slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from commlens.diagnosis.causes.hardware import add_hardware_of_slow
from commlens.diagnosis.causes.shared_place import Affected, shared_place
from commlens.diagnosis.causes.straggler import find_straggler
from commlens.diagnosis.index.node_health import nodes_of
from commlens.diagnosis.index.whereabouts import whereabouts
from commlens.diagnosis.words.finding import finding_of, locate
from commlens.diagnosis.words.hardware import add_hardware
from commlens.diagnosis.words.straggler import words
from commlens.model.collective import Stack
from commlens.model.ranklog import RankLog
from commlens.model.topology import Inventory
from commlens.model.verdict import Verdict
from commlens.speed.pace import Slow
from commlens.text import count


def straggler_verdict(
    slow: Slow,
    logs: Sequence[RankLog],
    profiles: Mapping[int, Mapping[Stack, int]] = MappingProxyType({}),
    *,
    compared: Iterable[int] = (),
    inventory: Inventory | None = None,
) -> Verdict:
    """Return the verdict on ranks that make a job slow, with the place where they spend their time.

    Args:
        slow: the ranks.
        logs: of all ranks of a node, with the newest records and with observations.
        profiles: samples by stack of one of the slow ranks and of another, if they were taken.
        compared: the ranks that were compared; none: those of ``logs``.
        inventory: where hosts are.
    """
    found = find_straggler(slow, logs, profiles, compared)
    add_hardware_of_slow(found.cause, logs)
    by_rank = {log.rank: log for log in logs}
    found.cause.place = shared_place(
        Affected(found.cause.culprits, found.cause.victims),
        whereabouts(by_rank, nodes_of(by_rank), inventory),
    )
    said = add_hardware(words(found), found.cause)
    finding = locate(finding_of(found.cause, said), None, found.source)
    ranks = len(found.cause.culprits) + len(found.cause.victims)
    return Verdict.from_findings(
        [finding], looked_at=f"{count(ranks, 'rank')}, {count(slow.steps, 'step')}"
    )
