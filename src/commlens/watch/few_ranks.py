"""The evidence of a few ranks that stand for all ranks of a large job.

In a hang, most of 10,000 ranks are in one state: the same stack, in the same collective. First all
nodes send only which of their ranks share a state (:mod:`commlens.watch.nodes.states`). Then some
nodes are asked for the records of a few ranks in each state, and of the ranks that these wait for,
round by round until no further rank is waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from commlens.diagnosis.fold.alike import (
    Alike,
    AlikeRanks,
    awaited_others,
    ranks_to_examine,
    standing_for_others,
)
from commlens.diagnosis.standstill import NO_POSES, PoseKeys
from commlens.model.ranklog import RankLog
from commlens.watch.nodes import remote_evidence
from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.states import States, fit

NODES_MAX: Final = 64
"""With more, it costs more to follow the waits than to read the newest records of all nodes."""
_ROUNDS_MAX: Final = 4  # in which the waits are followed from node to node
_UNKNOWN_MAX: Final = 16  # nodes that did not send the states of their ranks in time


class AskableNodes(Protocol):
    """The other nodes of a job, which can be asked."""

    @property
    def others(self) -> list[Beat]:
        """Those that live."""

    def host(self, slot: int) -> str:
        """Return a name for a node."""

    def gather_states(self, own: States) -> States | None:
        """Ask all for the states of their ranks, and join them with ``own``."""

    def gather(
        self, read: Callable[[int, bytes], Any], *, of: Sequence[int], records: int
    ) -> tuple[dict[int, Any], list[Beat]]:
        """Ask some for so many of the newest records of each rank. Returns the answers, read by
        ``read``, by slot, and the nodes that did not answer.
        """


class FewRanks(NamedTuple):
    """The evidence."""

    logs: list[RankLog]
    alike: AlikeRanks  # the ranks without a log
    nodes: dict[int, remote_evidence.NodeEvidence]  # by slot: those that were asked
    silent: list[Beat]  # the nodes that did not answer
    poses: PoseKeys = NO_POSES  # of all ranks that stand still


def few_ranks(
    nodes: AskableNodes, own: States, read_here: Callable[[], Sequence[RankLog]]
) -> FewRanks | None:
    """Ask the other nodes for the states of their ranks, and some of them for evidence.

    Args:
        nodes: the job's other nodes.
        own: the states of this node's ranks.
        read_here: returns the logs of this node's ranks.

    Returns:
        The evidence; None if the job moves on, or a few ranks are not enough.
    """
    states = nodes.gather_states(own)
    if states is None or states.too_many:
        return None
    others, known = nodes.others, states.ranks
    unknown = {beat.slot for beat in others if not known.issuperset(beat.ranks)}
    if len(unknown) > _UNKNOWN_MAX:
        return None
    slots = {rank: beat.slot for beat in others for rank in beat.ranks}
    classes = states.classes()
    wanted = ranks_to_examine(classes)
    here = read_here()
    found: dict[int, remote_evidence.NodeEvidence] = {}
    silent: list[Beat] = []
    asked: set[int] = set()
    for _ in range(_ROUNDS_MAX):
        # a node that was too slow to send states may be the one that all wait for
        asking = {*unknown, *(slots[rank] for rank in wanted if rank in slots)} - asked
        asked |= asking
        if len(asked) > NODES_MAX:
            return None
        answers, late = _ask(nodes, asking)
        found |= answers
        silent += late
        logs = list(itertools.chain(here, *(node.logs for node in found.values())))
        if not fit(states, logs):  # the job has moved on since the states were read
            return None
        alike = _alike(classes, logs)
        wanted = awaited_others(logs, alike)
        if not wanted:
            return FewRanks(logs, standing_for_others(logs, alike), found, silent, states.poses)
    return None


def _alike(classes: Iterable[frozenset[int]], logs: Iterable[RankLog]) -> AlikeRanks:
    """Return which ranks of each state were examined."""
    examined = frozenset(log.rank for log in logs)
    return AlikeRanks(Alike(ranks & examined, ranks - examined) for ranks in classes)


def _ask(
    nodes: AskableNodes, slots: set[int]
) -> tuple[dict[int, remote_evidence.NodeEvidence], list[Beat]]:
    if not slots:
        return {}, []
    ranks = sum(len(beat.ranks) for beat in nodes.others if beat.slot in slots)
    return nodes.gather(
        lambda slot, content: remote_evidence.unpack(content, nodes.host(slot)),
        of=sorted(slots),
        records=remote_evidence.more_records_of_each(ranks),
    )
