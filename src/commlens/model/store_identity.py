"""The identity of a group that programs make by hand, and the jobs that such groups join.

A process knows such a group by its store, its size, and its own rank in it. Processes that report
the same store and size are members of one group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from commlens.model.collective import HandMade
from commlens.model.ranklog import RankLog

_Run = TypeVar("_Run", bound=Hashable)


class StoreAddress(NamedTuple):
    """The place where processes meet; empty if they meet without a port."""

    host: str
    port: str


def parse_address(text: str | None) -> StoreAddress:
    """Parse ``"localhost:29600/weight_sync"``, ``"[::1]:29500"`` or ``"tcp://n1:29500?timeout=5"``."""
    place = (text or "").removeprefix("tcp://").partition("?")[0].partition("/")[0]
    host, _, port = place.rpartition(":")
    return StoreAddress(host, port) if port.isdecimal() else StoreAddress("", "")


def seen_from(log: RankLog, store: str) -> str:
    """Return the name of a store that a process uses, with its host called as other hosts call it:
    ``localhost`` is another host for each.
    """
    host, port = parse_address(store)
    is_here = host == "localhost" and port and log.host
    return f"{log.host}{store.removeprefix(host)}" if is_here else store


class StoreIdentity(NamedTuple):
    """The identity of a group made by hand, alike on all its members."""

    store: str
    size: int
    ordinal: int


def identity_of(log: RankLog, made: HandMade) -> StoreIdentity:
    """Return the identity of a group made by hand that a process is in."""
    return StoreIdentity(seen_from(log, made.store), made.size, made.ordinal)


def identities(logs: Iterable[RankLog]) -> set[StoreIdentity]:
    """Return the groups made by hand that processes are in, as far as all members know them."""
    return {
        identity_of(log, made)
        for log in logs
        for op in (*log.setups, *log.collectives)
        if (made := op.channel.group.hand_made) is not None and made.store
    }


def _server(group: StoreIdentity) -> Hashable:
    """Return what the members of a group have in common, whatever each was told of the group."""
    address = parse_address(group.store)
    return address if address.port else group


def joined_runs(runs: Mapping[_Run, Iterable[RankLog]], first: _Run) -> set[_Run]:
    """Return the first run, and all runs that groups made by hand join with it, directly or through
    other runs.

    Runs whose groups use one TCPStore are joined: their members may have been told different
    prefixes or sizes.
    """
    if len(runs) == 1:
        return {first}
    groups = {run: {_server(each) for each in identities(logs)} for run, logs in runs.items()}
    joined, todo = {first}, [first]
    while todo:
        run = todo.pop()
        more = {other for other in groups if not groups[run].isdisjoint(groups[other])} - joined
        joined |= more
        todo += more
    return joined
