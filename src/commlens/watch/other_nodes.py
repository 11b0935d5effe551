"""What the ranks of a job's other nodes are doing, for ``commlens status`` and other commands,
which are no nodes themselves: they ask the nodes' watchers through the job's store.

All ranks are asked in a small job. In a large one, few ranks stand for the others if ranks wait
(:mod:`commlens.watch.few_ranks`), else a sample of the nodes is asked, and the last beats of the
others are summed up in sentences.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from commlens.diagnosis.fold.alike import NONE_ALIKE, AlikeRanks
from commlens.dumps.clocks import correct_clocks
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog
from commlens.text import count, duration, ranks_and_verb, ranks_phrase
from commlens.watch.few_ranks import FewRanks, few_ranks
from commlens.watch.nodes import remote_evidence
from commlens.watch.nodes.beat import QUESTION, Beat, Request, decoded, key
from commlens.watch.nodes.bundles import BUNDLES_ABOVE, Bundles
from commlens.watch.nodes.calls import wake
from commlens.watch.nodes.meeting_places import Client, Place, Store, places, stored
from commlens.watch.nodes.periods import asked_period_s, rests_long
from commlens.watch.nodes.states import Collecting, States
from commlens.watch.nodes.states_tree import TREE_ABOVE, Tree
from commlens.watch.nodes.status_answers import StatusAnswer, store_request
from commlens.watch.roster import Roster
from commlens.watch.snapshot import one_run, snapshot

_WAITS_S: Final = 2.0  # a shorter wait is part of a step
_PATIENCE_S: Final = 8.0  # with a store that is busy: it looks up each client's name in DNS
_ASKED_MAX: Final = 64  # with more nodes, only some are asked for the records of their ranks
_SAMPLE: Final = 16  # as many: those with the longest waits, and some of all
_WINDOW_S: Final = 0.4  # for which this node's processes are observed


class OtherNodes(NamedTuple):
    """The known facts about the other nodes of a job."""

    logs: Sequence[RankLog] = ()  # of the ranks whose node answered, without those of this node
    lines: Sequence[str] = ()  # about the nodes that did not, in sentences
    # the ranks without a log that are in the state of ranks with one
    alike: AlikeRanks = NONE_ALIKE
    hosts: Mapping[int, str] = MappingProxyType({})  # of these, by rank
    # of each world on other nodes that may share a group made by hand with the job
    worlds: Sequence[Sequence[RankLog]] = ()

    def join(self, logs: Sequence[RankLog]) -> list[RankLog]:
        """Return this node's logs and the others', with all clocks as on one node."""
        joined = sorted(one_run([*logs, *self.logs]), key=lambda log: log.rank)
        correct_clocks(joined)
        return joined


def has_other_nodes(logs: Sequence[RankLog]) -> bool:
    """Return whether the job has more ranks than these of this node."""
    return any(log.world_size > len(logs) for log in logs)


def look_at_other_nodes(job_dir: Path) -> OtherNodes:
    """Ask the other nodes' watchers what their ranks are doing. Takes about a second, some more if
    a node does not answer.

    With many nodes, a few are asked: if ranks wait, those whose ranks show the fault; else a
    sample.

    Args:
        job_dir: the folder of the job's black boxes on this node.
    """
    store, here = _meeting([job_dir])
    if store is None:
        return OtherNodes()
    found = OtherNodes()
    try:
        with asked_in(store) as client:
            nodes = AskedNodes(client, here)
            found = OtherNodes(lines=other_node_lines(nodes.beats, here))
            return _ask_others(nodes, here, lambda: snapshot(job_dir, window_s=_WINDOW_S))
    except OSError as error:
        problem = f"Not all is known of the other nodes: {store} {reason(error)}."
        return found._replace(lines=[problem, *found.lines])


def pack_world_snapshot(folders: Sequence[Path], records: int) -> bytes:
    """Look at the ranks of all nodes of this world now, and pack so many of the newest records of
    each for a command on a node of another world.
    """
    answers = [(os.uname().nodename, remote_evidence.pack_snapshot(folders, records))]
    store, here = _meeting(folders)
    if store is not None:
        with contextlib.suppress(OSError), asked_in(store) as client:
            nodes = AskedNodes(client, here)
            found, _ = nodes.gather(
                lambda slot, content: (nodes.host(slot), content),
                of=sorted(_some_of(nodes.others)),
                records=records,
            )
            answers += found.values()
    return remote_evidence.pack_world(answers)


def _meeting(folders: Sequence[Path]) -> tuple[Store | None, list[int]]:
    """Return the store in which the nodes of a job meet, if it has several, and the ranks here."""
    with contextlib.closing(Roster(folders)) as roster:
        roster.refresh()
        roster.read_headers()
        members = roster.current()
        stores = [place for place in places(members, None) if isinstance(place, Store)]
        return next(iter(stores), None), [member.rank for member in members]


def asked_in(place: Place) -> contextlib.closing[Client]:
    """Connect to a place to ask the nodes that meet there."""
    return contextlib.closing(place.open(lambda waited_s: waited_s < _PATIENCE_S))


def _ask_others(
    nodes: AskedNodes, here: Sequence[int], read_here: Callable[[], list[RankLog]]
) -> OtherNodes:
    others = nodes.others
    if len(others) > TREE_ABOVE and any(map(_is_unusual, nodes.beats)):
        few = few_ranks(nodes, States(), read_here)
        if few is not None:
            return _of_few(few, nodes, here)
    asked = _some_of(others)
    answers, silent = nodes.gather(
        lambda slot, content: remote_evidence.unpack(content, nodes.host(slot)),
        of=sorted(asked),
        records=remote_evidence.HEAD_RECORDS,
    )
    lines = _lines(answers.values(), silent, nodes, here, unread=nodes.unread)
    lines += _not_asked_lines([beat for beat in others if beat.slot not in asked])
    logs = [log for node in answers.values() for log in node.logs if log.rank not in here]
    return OtherNodes(logs, lines)


def _of_few(few: FewRanks, nodes: AskedNodes, here: Sequence[int]) -> OtherNodes:
    """Return the known facts about all nodes, inferred from a few ranks of each state."""
    known = few.alike.others.union(log.rank for log in few.logs)
    silent = [beat for beat in nodes.others if not known.issuperset(beat.ranks)]
    return OtherNodes(
        [log for log in few.logs if log.rank not in here],
        _lines(few.nodes.values(), silent, nodes, here),
        few.alike,
        {rank: beat.host for beat in nodes.others for rank in beat.ranks},
    )


def _lines(
    answers: Iterable[remote_evidence.NodeEvidence],
    silent: Iterable[Beat],
    nodes: AskedNodes,
    here: Sequence[int],
    *,
    unread: str = "",
) -> list[str]:
    """Return sentences about the evidence that could not be read, and the last words of nodes that
    did not answer or have left.
    """
    left = [beat for beat in nodes.beats if beat.finished]
    return [
        *(problem for node in answers for problem in node.problems),
        *filter(None, [unread]),
        *(
            f"Node {beat.host} ({ranks_phrase(beat.ranks)}) did not answer. Its watcher said last:"
            f" {_state(beat)}."
            for beat in silent
        ),
        *other_node_lines(left, here),
    ]


def _some_of(others: Sequence[Beat]) -> set[int]:
    """Return the slots of the nodes to ask: all, or if there are many, those with dead ranks and
    the longest waits, and some of all.
    """
    if len(others) <= _ASKED_MAX:
        return {beat.slot for beat in others}
    unusual = sorted(
        filter(_is_unusual, others),
        key=lambda beat: (not beat.dead, -beat.wait_s),
    )
    some = others[:: len(others) // (_SAMPLE // 2) + 1]
    return {beat.slot for beat in (*unusual[: _SAMPLE // 2], *some)}


def reason(error: OSError) -> str:
    """Return why nodes could not be asked, as the end of a sentence about the place."""
    if isinstance(error, TimeoutError):
        return f"has not answered for {_PATIENCE_S:.0f} s"
    if isinstance(error, ConnectionRefusedError):
        return "refuses connections"
    return f"cannot be asked: {error}"


def other_node_lines(beats: Sequence[Beat], here: Sequence[int]) -> list[str]:
    """Return one sentence for each node other than this one: its ranks, how long the longest of
    them has waited, which of them died.

    Args:
        beats: of all nodes.
        here: this node's ranks.
    """
    return [
        f"{ranks_phrase(beat.ranks)} on {beat.host}: {_state(beat)}."
        for beat in sorted(beats, key=lambda one: one.order)
        if beat.ranks and not set(beat.ranks) & set(here)
    ]


def _not_asked_lines(beats: Sequence[Beat]) -> list[str]:
    """Return a sentence for each state of nodes that were not asked."""
    states = grouped(
        ("ranks wait" if _waits(beat) and not beat.dead else _state(beat), beat) for beat in beats
    )
    return [
        f"{ranks_phrase(rank for beat in nodes for rank in beat.ranks)} on"
        f" {count(len(nodes), 'node')} were not asked. Their watchers said last: {state}."
        for state, nodes in states.items()
    ]


def _waits(beat: Beat) -> bool:
    return beat.wait_s >= _WAITS_S


def _is_unusual(beat: Beat) -> bool:
    return bool(beat.dead) or _waits(beat)


def _state(beat: Beat) -> str:
    if beat.dead:
        return ranks_and_verb(beat.dead, "has died", "have died")
    if beat.finished:
        return "finished"
    if _waits(beat):
        return f"the longest wait is {duration(beat.wait_s * 1e9)}"
    return "no rank waits for long"


# --- the questions to the watchers of a job's nodes, from a command that is no node itself

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
        answers_s: for how long to wait for the answers.
    """

    def __init__(
        self, client: Client, here: Collection[int], answers_s: float = _ANSWERS_S
    ) -> None:
        self._client = client
        self._answers_s = answers_s
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
        end = time.monotonic() + self._answers_s + asked_period_s(self._count)
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
            look = decoded(value, StatusAnswer)
            if look is not None and look.number >= number:
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
    beats = [beat for value in values if (beat := decoded(value, Beat)) is not None]
    found = _of_last_incarnations(beats)
    if not is_bundled or not found:
        return found
    # bundles are late, and the beat of the node that reports has the longest wait of all
    first = min(found, key=lambda one: (one.finished, one.order))
    (value,) = client.get([key("node", first.slot)])
    return [decoded(value, Beat) or first if beat is first else beat for beat in found]


def _of_last_incarnations(beats: Sequence[Beat]) -> list[Beat]:
    found: list[Beat] = []
    ranks: set[int] = set()
    for beat in sorted(beats, key=lambda one: one.slot, reverse=True):
        if ranks.isdisjoint(beat.ranks):
            found.append(beat)
            ranks.update(beat.ranks)
    return found[::-1]
