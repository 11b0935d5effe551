"""Ask the watchers of a job's nodes about their ranks, through the job's store, from a command that
is no node itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from commlens.text import ranks_phrase
from commlens.watch.nodes.beat import Beat, Request, decoded, key
from commlens.watch.nodes.bundles import BUNDLES_ABOVE, Bundles
from commlens.watch.nodes.calls import wake
from commlens.watch.nodes.collecting import Collecting
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.periods import asked_period_s, rests_long
from commlens.watch.nodes.states import States
from commlens.watch.nodes.states_tree import Tree
from commlens.watch.nodes.status_answers import QUESTION, StatusAnswer, store_request

_MOST: Final = 1 << 15  # values that are read, those of the nodes that came last
# a watcher at rest asks the store once a second, and looks for less than one
_ANSWERS_S: Final = 3.0
_POLL_S: Final = 0.1

Answer = TypeVar("Answer")


class AskedNodes:
    """The nodes of a job as of now, and their answers to a command.

    All methods raise OSError if the store cannot be asked.

    Args:
        client: of the job's store.
        here: the ranks of the node that the command runs on.
    """

    def __init__(self, client: Client, here: Collection[int]) -> None:
        self._client = client
        self._count = 0
        self.beats: list[Beat] = []
        """The last values of all nodes, by slot; empty without watchers."""
        if client.existing_keys([key("nodes")]):
            self._count = client.add(key("nodes"), 0) % QUESTION
            self.beats = newest_beats(client, self._count)
        self.others = [
            beat for beat in self.beats if not beat.finished and not set(beat.ranks) & set(here)
        ]
        """The other nodes that have not left."""

    @property
    def unread(self) -> str:
        """A sentence if the values of ranks were not read, because there are too many nodes."""
        size = max((beat.world_size for beat in self.beats), default=0)
        missing = set(range(size)).difference(*(beat.ranks for beat in self.beats))
        if self._count <= _MOST or not missing:
            return ""
        return (
            f"Nothing is known of {ranks_phrase(missing)}: only the {_MOST:,} nodes that came last"
            " were asked."
        )

    def host(self, slot: int) -> str:
        """Return the name of a node's host."""
        return next((beat.host for beat in self.beats if beat.slot == slot), "node")

    def gather(
        self, read: Callable[[int, bytes], Answer], *, of: Sequence[int], records: int
    ) -> tuple[dict[int, Answer], list[Beat]]:
        """Ask nodes to look at their ranks.

        Args:
            read: reads the answer of the node with this slot.
            of: the slots of the nodes to ask.
            records: how many of each rank's newest records to ask for.

        Returns:
            The answers by slot, and the nodes that did not answer in time.
        """
        number = self._ask(nodes=list(of), records=records).number
        found: dict[int, StatusAnswer] = {}
        end = time.monotonic() + _ANSWERS_S + asked_period_s(self._count)
        while (waits_for := set(of) - found.keys()) and time.monotonic() < end:
            time.sleep(_POLL_S)
            found |= self._answers(waits_for, number)
        return {slot: read(slot, found[slot].evidence) for slot in sorted(found)}, [
            beat for beat in self.others if beat.slot in of and beat.slot not in found
        ]

    def gather_states(self, own: States) -> States | None:
        """Ask all nodes for the states of their ranks, which they join along the tree.

        Args:
            own: states that are known already.

        Returns:
            The states that came in time; None if the nodes cannot form a tree: too many slots
            belong to nodes that have gone.
        """
        slots = {beat.slot for beat in self.beats if not beat.finished}
        tree = Tree.of(slots, self._count)
        if tree is None:
            return None
        request, period_s = self._ask(tree=tree), asked_period_s(self._count)
        root = Collecting(request, None, began=time.monotonic(), period_s=period_s)
        root.add_own(own)
        while not root.is_done:
            time.sleep(_POLL_S)
            root.collect(self._client)
        return root.sum

    def _ask(self, **what: Any) -> Request:
        number = self._client.add(key("nodes"), QUESTION) // QUESTION
        request = Request(number, **what)
        store_request(self._client, request)
        if rests_long(self._count):
            wake(self._client, request.nodes or [beat.slot for beat in self.beats])
        self._client.get([])  # send it
        return request

    def _answers(self, slots: Iterable[int], number: int) -> dict[int, StatusAnswer]:
        found: dict[int, StatusAnswer] = {}
        for slot, value in stored(self._client, "look", sorted(slots)).items():
            try:
                look = msgspec.msgpack.decode(value, type=StatusAnswer)
            except msgspec.DecodeError:
                continue
            if look.number >= number:
                found[slot] = look
        return found


def newest_beats(client: Client, count: int) -> list[Beat]:
    """Return the last values of the newest nodes, by slot.

    A node draws a new slot when its workers are restarted: former values of its ranks are left out.

    Args:
        client: of the job's store.
        count: how many slots were ever drawn.
    """
    slots = range(max(0, count - _MOST), count)
    is_bundled = len(slots) > BUNDLES_ABOVE
    values = (
        Bundles().read(client, slots, time.monotonic())
        if is_bundled
        else list(stored(client, "node", slots).values())
    )
    beats = [beat for beat in map(decoded, values) if beat is not None]
    found = _of_last_incarnations(beats)
    if not is_bundled or not found:
        return found
    # bundles are late, and the value of the node that reports tells of the waits of all
    first = min(found, key=lambda one: (one.finished, one.order))
    (value,) = client.get([key("node", first.slot)])
    return [decoded(value) or first if beat is first else beat for beat in found]


def _of_last_incarnations(beats: Sequence[Beat]) -> list[Beat]:
    found: list[Beat] = []
    ranks: set[int] = set()
    for beat in sorted(beats, key=lambda one: one.slot, reverse=True):
        if ranks.isdisjoint(beat.ranks):
            found.append(beat)
            ranks.update(beat.ranks)
    return found[::-1]
