"""The identity of a group that programs make by hand, and the jobs that such groups join.

A process knows such a group by its store, its size, and its own rank in it. Processes that report
the same store and size are members of one group.
"""

from __future__ import annotations

from collections import Counter
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
    return {group for group, _ in _memberships(logs)}


def _memberships(logs: Iterable[RankLog]) -> set[tuple[StoreIdentity, int]]:
    """Return the groups made by hand that processes are in, each with a process's rank in it."""
    return {
        (identity_of(log, made), made.member)
        for log in logs
        for op in (*log.setups, *log.collectives)
        if (made := op.channel.group.hand_made) is not None and made.store
    }


def joined_runs(runs: Mapping[_Run, Iterable[RankLog]], first: _Run) -> set[_Run]:
    """Return the first run, and all runs that groups made by hand join with it, directly or through
    other runs.

    Members may have been told different prefixes or sizes. So groups of one TCPStore join runs,
    too, if both lack members. Independent jobs may use one store: their groups are complete.
    """
    if len(runs) == 1:
        return {first}
    links = _links(runs)
    joined, todo = {first}, [first]
    while todo:
        run = todo.pop()
        more = {other for other in links if not links[run].isdisjoint(links[other])} - joined
        joined |= more
        todo += more
    return joined


def _links(runs: Mapping[_Run, Iterable[RankLog]]) -> dict[_Run, set[Hashable]]:
    """Return the groups of each run, and the servers of the stores of those that lack members."""
    found = {run: _memberships(logs) for run, logs in runs.items()}
    number = Counter(group for group, _ in set().union(*found.values()))
    links: dict[_Run, set[Hashable]] = {run: set() for run in runs}
    for run, each in found.items():
        for group, _ in each:
            address = parse_address(group.store)
            lacks = number[group] < group.size and bool(address.port)
            links[run] |= {group, address} if lacks else {group}
    return links
