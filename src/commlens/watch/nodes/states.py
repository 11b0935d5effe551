"""The states of a node's ranks, and of all ranks below it in the tree: only which ranks share a
state, not what the state is.
"""

from __future__ import annotations

import contextlib
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
from commlens.watch.nodes.remote_evidence import LOOK_S, newest_records
from commlens.watch.roster import Member, Roster
from commlens.watch.snapshot import observe

STATES_MAX: Final = 1024
"""With more states than this, all ranks are asked for their records."""
_SIZE_MAX: Final = 1 << 24


class States(msgspec.Struct, array_like=True):
    """Ranks by their state, as bit masks: answers of many nodes are joined at little cost."""

    by_key: dict[bytes, int] = {}
    alone: int = 0  # ranks that are in no state with others
    too_many: bool = False  # states: some are missing
    poses: dict[bytes, int] = {}  # of ranks that stand still, by the key of their pose

    def add(self, other: States) -> None:
        """Add the ranks of other nodes. What was added before may be added again."""
        for key, mask in other.by_key.items():
            self.by_key[key] = self.by_key.get(key, 0) | mask
        for key, mask in other.poses.items():
            self.poses[key] = self.poses.get(key, 0) | mask
        self.alone |= other.alone
        self.too_many |= other.too_many or len(self.by_key) > STATES_MAX

    @property
    def ranks(self) -> set[int]:
        """All ranks whose state is known."""
        mask = self.alone
        for each in self.by_key.values():
            mask |= each
        return ranks_in(mask)

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
    """Return the states of a node's ranks.

    Args:
        members: of this node.
        observations: by pid.
        health: the hardware of this node.
    """
    found = States()
    for number, member in enumerate(members):
        key = pose = None
        if member.box is not None and member.status is not None:
            try:
                log = member.box.log(newest=newest_records(member.box.status(), RECORDS))
                log.observation = observations.get(member.pid, Observation())
                log.health = health if not number else None
                key, pose = state_key(log), pose_key(log)
            except FormatError:
                key = pose = None
        if pose is not None and member.rank >= 0:
            found.poses[pose] = found.poses.get(pose, 0) | 1 << member.rank
        if key is None or member.rank < 0:
            found.alone |= 1 << max(member.rank, 0)
        else:
            found.by_key[key] = found.by_key.get(key, 0) | 1 << member.rank
    return found


def states_snapshot(folders: Sequence[Path]) -> States:
    """Look at this node's ranks now, and return their states for ``commlens status``."""
    with contextlib.closing(Roster(folders)) as roster:
        observations = observe(roster, Observer(), window_s=LOOK_S)
        return states_of(roster.current(), observations, None)


def fit(states: States, logs: Iterable[RankLog]) -> bool:
    """Return whether ranks are still in their states, as far as their records tell."""
    for log in logs:
        key = next((key for key, mask in states.by_key.items() if mask >> log.rank & 1), None)
        now = state_key(log) if key is not None else None
        if key is not None and (now is None or records_of(now) != records_of(key)):
            return False
    return True


def ranks_in(mask: int) -> set[int]:
    """Return the ranks whose bits are set."""
    found: set[int] = set()
    for at, byte in enumerate(_bytes(mask)):
        if byte:
            found.update(8 * at + bit for bit in range(8) if byte >> bit & 1)
    return found


def pack_states(states: States, request: tuple[int, int]) -> bytes:
    """Pack an answer to the request of a node: its slot and the number of the request."""
    by_key = {key: _bytes(mask) for key, mask in list(states.by_key.items())[:STATES_MAX]}
    poses = {key: _bytes(mask) for key, mask in list(states.poses.items())[:STATES_MAX]}
    packed = _Packed(by_key, _bytes(states.alone), states.too_many, request, poses)
    return zlib.compress(msgspec.msgpack.encode(packed), 1)


def unpack_states(content: bytes, request: tuple[int, int]) -> States | None:
    """Read an answer; None if it is damaged, or answers another request."""
    try:
        unpacked = zlib.decompressobj().decompress(content, _SIZE_MAX)
        packed = msgspec.msgpack.decode(unpacked, type=_Packed)
    except (zlib.error, msgspec.DecodeError):
        return None
    if packed.request != request:
        return None
    by_key = {key: int.from_bytes(mask, "little") for key, mask in packed.by_key.items()}
    poses = {key: int.from_bytes(mask, "little") for key, mask in packed.poses.items()}
    return States(by_key, int.from_bytes(packed.alone, "little"), packed.too_many, poses)


def _bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")
