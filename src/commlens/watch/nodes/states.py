"""Which ranks of a job share a state, without the state itself: the nodes collect this along a tree
(:mod:`commlens.watch.nodes.states_tree`), so that the node that reports reads one value for all.

A state's key is a hash of a rank's newest records and its surroundings; ranks are the bits of a
mask. Seven of eight ranks wait in a collective for rank 3, which loads data::

    States(by_key={b"...": 0b11110111}, alone=0b00001000)
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.diagnosis.fold.alike import RECORDS, records_of, state_key
from commlens.diagnosis.standstill import pose_key
from commlens.errors import FormatError
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation, RankLog
from commlens.processes.observer import Observer
from commlens.watch.nodes.beat import COMMAND, Request, inflated, key
from commlens.watch.nodes.meeting_places import Client, stored
from commlens.watch.nodes.remote_evidence import LOOK_S, newest_records
from commlens.watch.nodes.states_tree import LEVEL_S
from commlens.watch.roster import Member, Roster
from commlens.watch.snapshot import observe

STATES_MAX: Final = 1024
"""With more states than this, all ranks are asked for their records."""


class States(msgspec.Struct, array_like=True):
    """Ranks by their state, as bit masks: answers of many nodes are joined at little cost."""

    by_key: dict[bytes, int] = {}
    alone: int = 0  # ranks that must be examined themselves, such as one that waits for none
    too_many: bool = False  # there are more states than are sent: some are missing
    poses: dict[bytes, int] = {}  # of ranks that stand still, by the key of stack and collective

    def add(self, other: States) -> None:
        """Add the ranks of other nodes. What was added before may be added again."""
        for own, added in ((self.by_key, other.by_key), (self.poses, other.poses)):
            for state, mask in added.items():
                own[state] = own.get(state, 0) | mask
        self.alone |= other.alone
        self.too_many |= other.too_many or len(self.by_key) > STATES_MAX

    @property
    def ranks(self) -> set[int]:
        """All ranks whose state is known."""
        return ranks_in(functools.reduce(operator.or_, self.by_key.values(), self.alone))

    def classes(self) -> list[frozenset[int]]:
        """Return the ranks in each state."""
        return [
            *(frozenset(ranks_in(mask)) for mask in self.by_key.values()),
            *(frozenset([rank]) for rank in ranks_in(self.alone)),
        ]


class _Packed(msgspec.Struct, array_like=True):
    by_key: dict[bytes, bytes]
    alone: bytes
    too_many: bool
    request: tuple[int, int]
    poses: dict[bytes, bytes]


def states_of(
    members: Sequence[Member],
    observations: Mapping[int, Observation],
    health: NodeHealth | None,
) -> States:
    """Return the states of a node's ranks. A process that does not know its rank yet is in none, so
    the node that reports asks this node for its records.

    Args:
        members: of this node.
        observations: by pid.
        health: the hardware of this node.
    """
    found = States()
    for number, member in enumerate(each for each in members if each.rank >= 0):
        state = pose = None
        if member.box is not None and member.status is not None:
            with contextlib.suppress(FormatError):
                log = member.box.log(newest=newest_records(member.box.status(), RECORDS))
                log.observation = observations.get(member.pid, Observation())
                log.health = health if not number else None  # a node's, so in one of its logs
                state, pose = state_key(log), pose_key(log)
        if pose is not None:
            found.poses[pose] = found.poses.get(pose, 0) | 1 << member.rank
        if state is None:
            found.alone |= 1 << member.rank
        else:
            found.by_key[state] = found.by_key.get(state, 0) | 1 << member.rank
    return found


def states_snapshot(folders: Sequence[Path]) -> States:
    """Look at this node's ranks now, and return their states for ``commlens status``."""
    with contextlib.closing(Roster(folders)) as roster:
        observations = observe(roster, Observer(), window_s=LOOK_S)
        return states_of(roster.current(), observations, None)


def fit(states: States, logs: Iterable[RankLog]) -> bool:
    """Return whether ranks are still in the states that they had, as far as their records show."""
    for log in logs:
        state = next((each for each, mask in states.by_key.items() if mask >> log.rank & 1), None)
        now = state_key(log) if state is not None else None
        if state is not None and (now is None or records_of(now) != records_of(state)):
            return False
    return True


def ranks_in(mask: int) -> set[int]:
    """Return the ranks whose bits are set."""
    return {
        8 * at + bit
        for at, byte in enumerate(_bytes(mask))
        if byte
        for bit in range(8)
        if byte >> bit & 1
    }


def pack_states(states: States, request: tuple[int, int]) -> bytes:
    """Pack an answer to the request of a node: its slot and the number of the request."""
    by_key = {key: _bytes(mask) for key, mask in list(states.by_key.items())[:STATES_MAX]}
    poses = {key: _bytes(mask) for key, mask in list(states.poses.items())[:STATES_MAX]}
    packed = _Packed(by_key, _bytes(states.alone), states.too_many, request, poses)
    return zlib.compress(msgspec.msgpack.encode(packed), 1)


def unpack_states(content: bytes, request: tuple[int, int]) -> States | None:
    """Read an answer; None if it is damaged, or answers another request."""
    packed = inflated(content, _Packed)
    if packed is None or packed.request != request:
        return None
    by_key = {key: int.from_bytes(mask, "little") for key, mask in packed.by_key.items()}
    poses = {key: int.from_bytes(mask, "little") for key, mask in packed.poses.items()}
    return States(by_key, int.from_bytes(packed.alone, "little"), packed.too_many, poses)


def _bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


# --- collected along the tree

STATES: Final = "states"
"""The kind of value that answers the node that reports."""
LOOK_STATES: Final = "look-states"
"""The kind of value that answers ``commlens status``."""


class Collecting:
    """The states collected for one request. Its methods may be called from any thread.

    Args:
        request: for the states of all ranks.
        slot: of the node that collects; None: the requester collects, and reads the root's sum.
        began: ``time.monotonic()`` at which the request was seen.
        period_s: between two looks of a node at the values of others.
    """

    def __init__(
        self, request: Request, slot: int | None, *, began: float, period_s: float
    ) -> None:
        assert request.tree is not None
        self.request = request
        self.sum = States()
        self.has_own = slot is None  # the states of the node that collects were added
        self.is_done = False  # all is collected and, by a node of the tree, stored
        self._tree = tree = request.tree
        self._slot = slot
        self._kind = LOOK_STATES if request.slot == COMMAND else STATES
        self._began = began
        self._until = (
            began + LEVEL_S + tree.patience_s(tree.first, period_s)
            if slot is None
            else began + tree.patience_s(slot, period_s)
        )
        self._period_s = period_s
        self._waits_for = {tree.first} if slot is None else set(tree.children(slot))
        self._moved_up: set[int] = set()  # late nodes, whose children are read in their place, too
        self._lock = threading.Lock()

    def to_read(self, now: float) -> list[int]:
        """Return the slots of the nodes whose values to read now."""
        for slot in sorted(self._waits_for - self._moved_up):
            if now > self._began + self._tree.patience_s(slot, self._period_s):
                self._moved_up.add(slot)
                self._waits_for.update(self._tree.children(slot))
        return sorted(self._waits_for)

    def add_own(self, states: States) -> None:
        """Add the states of this node's own ranks."""
        with self._lock:
            self.sum.add(states)
        self.has_own = True

    def add(self, slot: int, states: States) -> None:
        """Add the states that a node stored."""
        self._waits_for.discard(slot)
        with self._lock:
            self.sum.add(states)

    def collect(self, client: Client) -> None:
        """Add the states that nodes have stored since, and store the sum once no node is waited
        for.
        """
        for slot, value in stored(client, self._kind, self.to_read(time.monotonic())).items():
            states = unpack_states(value, self.request.id)
            if states is not None:
                self.add(slot, states)
        self.is_done = self.is_complete(time.monotonic())
        if self.is_done and self._slot is not None:
            client.set(key(self._kind, self._slot), pack_states(self.copy(), self.request.id))
            client.get([])  # send it

    def is_complete(self, now: float) -> bool:
        """Return whether no node is waited for any longer: all have answered, this node's own
        watcher among them, or it is too late.
        """
        return now > self._until or (self.has_own and not self._waits_for)

    def copy(self) -> States:
        """Return a copy of the states collected so far."""
        copy = States()
        with self._lock:
            copy.add(self.sum)
        return copy
