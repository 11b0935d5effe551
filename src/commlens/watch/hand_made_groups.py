"""Groups made by hand (``ProcessGroupNCCL(store, ...)``) whose members are not all in sight, and
the store or folder in which the worlds that share one meet.

A *world* is the ranks of one default group. Where worlds meet, the beat of each holds one number in
place of ranks, whose low 48 bits are the world's *name*, a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from commlens.config import AUTO
from commlens.errors import FormatError
from commlens.model.collective import QUEUE
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import StoreIdentity, identity_of, parse_address
from commlens.watch.nodes.beat import Beat, ByHand
from commlens.watch.nodes.meeting_places import Folder, Place, Store
from commlens.watch.roster import Member

EXCHANGES_MAX: Final = 4  # each has a thread; programs that make groups anew use few stores
NAME_BITS: Final = 48
OFF: Final = "off"


def name_of(host: str, folder: Path) -> int:
    """Return the name of the world with this folder of black boxes."""
    digest = hashlib.sha256(f"{host} {folder}".encode()).hexdigest()
    return int(digest, 16) % (1 << NAME_BITS)


def has_name(beat: Beat, names: Collection[int]) -> bool:
    """Return whether a beat is of a world with one of these names."""
    return not names_in(beat).isdisjoint(names)


def names_in(beat: Beat) -> set[int]:
    """Return the names in the ranks of a world's beat: it has one rank."""
    return {rank % (1 << NAME_BITS) for rank in beat.ranks}


def newest_logs(members: Sequence[Member]) -> list[RankLog]:
    """Return the logs of members with what they set up, and few records."""
    logs = []
    for member in members:
        with contextlib.suppress(FormatError):
            logs += [member.box.log(newest=1)] if member.box is not None else []
    return logs


class MadeByHand(NamedTuple):
    """A group made by hand, as the log of one of its members records it."""

    identity: StoreIdentity  # the same for all members
    member: int  # its number in the group
    at_ns: int  # Unix ns


def made_in(logs: Iterable[RankLog]) -> Iterator[MadeByHand]:
    """Yield the groups made by hand in which other nodes may have members: message queues are in
    the memory of one node.
    """
    for log in logs:
        for op in (*log.setups, *log.collectives):
            made = op.channel.group.hand_made
            if made is not None and made.store and op.channel.device != QUEUE:
                yield MadeByHand(identity_of(log, made), made.member, op.announced_ns)


def by_hand(logs: Sequence[RankLog], others: Iterable[RankLog] = ()) -> list[ByHand]:
    """Return the groups made by hand that processes with these ``logs`` are in, with the members
    among these and ``others``, oldest first.
    """
    own = {made.identity for made in made_in(logs)}
    seen = sorted(made_in([*logs, *others]), key=lambda made: made.at_ns)
    members = grouped((made.identity, made.member) for made in seen if made.identity in own)
    return [ByHand(*each, tuple(sorted(set(known)))) for each, known in members.items()]


def places_to_meet(groups: Iterable[ByHand], where: str, host: str) -> list[Place]:
    """Return the stores or folders of the newest groups that have members out of sight. Their
    worlds meet there.

    Args:
        groups: the members that are in sight, oldest first.
        where: the setting ``meet``.
        host: this machine's name.
    """
    members = grouped(((each.store, each.size, each.ordinal), each.members) for each in groups)
    # of the groups of which fewer members are in sight than there are
    stores = dict.fromkeys(
        store
        for (store, size, _), known in members.items()
        if len({*chain.from_iterable(known)}) < size
    )
    found: dict[Place, None] = {}
    for store in stores:
        address = parse_address(store)
        name = ":".join(address) if address.port else store
        if where != AUTO:
            digest = hashlib.sha256(name.encode()).hexdigest()[:16]
            found[Folder(Path(where) / f".commlens-worlds-{digest}")] = None
        elif address.port:
            at = "localhost" if address.host == host else address.host
            found[Store(at, int(address.port), within="commlens/worlds/")] = None
    return [*found][-EXCHANGES_MAX:]
