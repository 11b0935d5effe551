"""One rank's foreign dump, reduced to what diagnosis needs of it: runs in a worker process, and only its result comes back.

A coalesced group becomes one operation, an entry that only closes a point-to-point batch none, a stack the lines of the user's
code. What many ranks share (what was asked, lines, groups) is kept once for all that are read together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from commlens.formats.columns import COMPLETED, RETIRED, STARTED, RankColumns, Status
from commlens.model.collective import Channel, CollectiveArgs, Frame, FrameKind, Stack, user_frame
from commlens.model.ops import POINT_TO_POINT
from commlens.model.ranklog import Observation

Integers = npt.NDArray[Any]

IN_FLIGHT, RUNNING, DONE = 0, 1, 2
"""``Extract.state``: issued, known to run on the device, and ended."""

_LINES = 4  # of the user's code kept of each stack


@dataclass(slots=True)
class Extract:
    """One rank, as columns: one value for each operation, in the order of issue."""

    rank: int
    world_size: int = 0
    host: str = ""
    job: str = ""
    source: str = ""
    origin: str = "flight-recorder"
    version: str = ""
    captured_ns: int = 0
    possible_ranks: tuple[int, ...] = ()
    problems: list[str] = field(default_factory=list)
    issued: int = 0
    timed: bool = False  # says when an operation starts on the device
    only_active: bool = False  # holds nothing that had ended
    unbroken: int = 0  # number of records in the dump, where none between them is missing
    channels: list[Channel] = field(default_factory=list)
    groups: list[Channel] = field(default_factory=list)  # all that the rank is in, used or not
    troubles: list[str] = field(default_factory=list)  # what a log says and no operation can
    exception: str = ""
    exception_stack: Stack = ()
    observation: Observation = field(default_factory=Observation)
    status: dict[str, Status] = field(default_factory=dict)  # by group name: last enqueued, started and completed
    args: list[CollectiveArgs] = field(default_factory=list)
    sites: list[Stack] = field(default_factory=list)

    channel: Integers = field(default_factory=lambda: np.zeros(0, "int32"))
    args_index: Integers = field(default_factory=lambda: np.zeros(0, "int32"))
    site: Integers = field(default_factory=lambda: np.zeros(0, "int32"))  # -1: no stack
    number: Integers = field(default_factory=lambda: np.zeros(0, "int64"))
    state: Integers = field(default_factory=lambda: np.zeros(0, "uint8"))
    record: Integers = field(default_factory=lambda: np.zeros(0, "int64"))
    peer: Integers = field(default_factory=lambda: np.zeros(0, "int32"))  # -1 not point to point, or any
    batch: Integers = field(default_factory=lambda: np.zeros(0, "int32"))  # point-to-point ops issued as one share it
    created_ns: Integers = field(default_factory=lambda: np.zeros(0, "int64"))
    completed_ns: Integers = field(default_factory=lambda: np.zeros(0, "int64"))

    def __len__(self) -> int:
        return len(self.number)

    @property
    def wrapped(self) -> bool:
        """Whether older operations are not in it."""
        return self.issued > len(self) or bool(self.problems)


class Shared:
    """Keeps one object of what many ranks have in common, so that it is stored and sent once."""

    def __init__(self) -> None:
        self._asked: dict[tuple[CollectiveArgs, ...], list[CollectiveArgs]] = {}
        self._sites: dict[tuple[Stack, ...], list[Stack]] = {}
        self._channels: dict[Channel, Channel] = {}

    def adopt(self, found: Extract) -> Extract:
        """An extract of another process, with the objects of this one."""
        found.args, found.sites = self.asked(found.args), self.sites(found.sites)
        found.channels = [self.channel(one) for one in found.channels]
        found.groups = [self.channel(one) for one in found.groups]
        return found

    def channel(self, channel: Channel) -> Channel:
        """The same channel, the same object."""
        return self._channels.setdefault(channel, channel)

    def asked(self, table: Sequence[CollectiveArgs]) -> list[CollectiveArgs]:
        """The same table, the same object."""
        return self._asked.setdefault(tuple(table), list(table))

    def sites(self, table: Sequence[Stack]) -> list[Stack]:
        """The same lines, the same object."""
        return self._sites.setdefault(tuple(table), list(table))


def extract(rows: RankColumns, shared: Shared | None = None) -> Extract:
    """Reduce one rank's columns."""
    shared = shared or Shared()
    asked, args_index, keep = _merged(rows)
    p2p_asked = np.array([one.op in POINT_TO_POINT for one in asked] or [False])
    sites, site = _sites(rows, keep)
    found = Extract(
        rank=rows.rank,
        world_size=rows.world_size,
        host=rows.host,
        job=rows.job,
        source=rows.source,
        origin=rows.origin,
        version=rows.version,
        captured_ns=rows.captured_ns,
        possible_ranks=rows.possible_ranks if rows.rank < 0 else (),
        problems=list(rows.problems),
        issued=rows.issued - (len(rows) - len(keep)),
        timed=bool((rows.state == STARTED).any() or (rows.started_ns > 0).any()),
        only_active=bool(len(rows)) and not bool((rows.state >= COMPLETED).any()) and int(rows.record_id[0]) > 0,
        unbroken=len(rows) if len(rows) and int(rows.record_id[-1] - rows.record_id[0]) + 1 == len(rows) else 0,
        channels=list(rows.channels),
        groups=list(rows.groups),
        troubles=list(rows.troubles),
        exception=rows.exception,
        exception_stack=rows.exception_stack,
        observation=rows.observation,
        status={name: rows.status[key] for key, name in rows.status_groups.items() if key in rows.status},
        args=shared.asked(asked),
        sites=shared.sites(sites),
    )
    state = rows.state[keep]
    found.channel = rows.channel[keep].astype("int32")
    found.args_index = args_index[keep].astype("int32")
    found.site = site.astype("int32")
    found.number = rows.sequence[keep].astype("int64")
    found.state = np.where((state == COMPLETED) | (state == RETIRED), DONE, np.where(state == STARTED, RUNNING, IN_FLIGHT)).astype("uint8")
    found.record = rows.record_id[keep].astype("int64")
    p2p = p2p_asked[found.args_index] if len(keep) else np.zeros(0, "bool")
    found.peer = np.where(p2p, rows.peer[keep], -1).astype("int32")
    found.batch = np.where(p2p, rows.coalesced[keep], 0).astype("int32")
    found.created_ns = rows.created_ns[keep].astype("int64")
    found.completed_ns = rows.completed_ns[keep].astype("int64")
    return found


def _merged(rows: RankColumns) -> tuple[list[CollectiveArgs], Integers, Integers]:
    """What was asked, an index into it for each row, and the rows that stand for an operation."""
    asked = list(rows.args)
    index = rows.args_index.astype("int64").copy()
    length = len(rows)
    if not length or not (rows.coalesced > 0).any():
        lone = np.flatnonzero(~(rows.closes & rows.p2p)) if length else np.zeros(0, "int64")
        return asked, index, lone
    keep = ~(rows.closes & rows.p2p)
    order = np.flatnonzero(rows.coalesced > 0)
    order = order[np.argsort(rows.coalesced[order], kind="stable")]
    starts = np.flatnonzero(np.diff(rows.coalesced[order], prepend=0))
    merged: dict[tuple[int, ...], int] = {}
    for members in np.split(order, starts[1:]):
        if rows.p2p[members].any():
            continue
        inner = members[~rows.closes[members]]
        last = members[-1]
        keep[members] = False
        keep[last] = True
        key = tuple(index[inner].tolist())
        if key and len(members) > 1:
            place = merged.get(key)
            if place is None:
                place = merged[key] = len(asked)
                asked.append(_together([rows.args[i] for i in key]))
            index[last] = place
    return asked, index, np.flatnonzero(keep)


def _together(members: Sequence[CollectiveArgs]) -> CollectiveArgs:
    """A coalesced group as one operation with all of its tensors."""
    ops = {one.op for one in members}
    return msgspec.structs.replace(
        members[0],
        op=ops.pop() if len(ops) == 1 else "coalesced",
        dispatcher_op="coalesced",
        inputs=tuple(spec for one in members for spec in one.inputs),
        outputs=tuple(spec for one in members for spec in one.outputs),
    )


def _sites(rows: RankColumns, keep: Integers) -> tuple[list[Stack], Integers]:
    """The user's lines of each stack, and for each operation an index into them."""
    stack = rows.stack[keep]
    used = np.unique(stack)
    places = np.full(int(used[-1]) + 2 if len(used) else 1, -1, "int64")
    sites: dict[Stack, int] = {}
    for number in used.tolist():
        if number >= 0:
            lines = lines_of(rows.stacks[number])
            places[number] = sites.setdefault(lines, len(sites)) if lines else -1
    return list(sites), places[stack]


def lines_of(stack: Stack) -> Stack:
    """The innermost lines of the user's code; where there are none, the line of a library that stands for them."""
    lines: tuple[Frame, ...] = tuple(frame for frame in stack if frame.kind is FrameKind.USER)[:_LINES]
    if not lines:
        innermost = user_frame(stack)
        lines = (innermost,) if innermost is not None else ()
    return lines


def extract_all(several: Iterable[RankColumns]) -> list[Extract]:
    """Reduce several files' ranks; what they share is one object."""
    shared = Shared()
    return [extract(rows, shared) for rows in several]
