"""Collect what NCCL prints: its warnings, the GPU and the network adapters of each rank, and with
NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL (2.18 to 2.28) the collectives, which are aligned across
ranks.

A line shows that a rank issued a collective, not that it completed. So those that all ranks of a
communicator issued alike count as completed, and those from the first difference on as in flight.

From these lines of ranks 0 and 1 (shortened), collective 1 has completed and 2 is in flight::

    n1:70:70 [0] NCCL INFO AllReduce: opCount 0 ... count 8 datatype 7 op 0 root 0 comm 0x1
    n1:71:71 [1] NCCL INFO AllReduce: opCount 0 ... count 8 datatype 7 op 0 root 0 comm 0x2
    n1:70:70 [0] NCCL INFO AllReduce: opCount 1 ... count 8 datatype 7 op 0 root 0 comm 0x1
    n1:71:71 [1] NCCL INFO Broadcast: opCount 1 ... count 8 datatype 7 op 0 root 0 comm 0x2

Which rank a process is, and of how many, is on the lines that tell of a communicator's start. The
number in brackets is the GPU, and adapters are numbered as the first of these lines lists them::

    n1:70:70 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB
    n1:70:70 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/1
    n1:70:70 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 ... commId 0x5f
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commlens.model.ops import POINT_TO_POINT, watchdog_wire_op

_HEAD: Final = re.compile(
    r"(?P<host>[\w.-]{1,255}):(?P<pid>\d{1,10}):\d{1,10} \[(?P<gpu>\d{1,4})\]"
    r" (?:NCCL INFO (?P<text>.*)|(?P<warning>(?:\S{1,200} )?NCCL WARN .*))"
)
_ADAPTERS: Final = re.compile(r"\[(\d{1,3})\]([\w-]{1,32}):\d{1,3}/(?:IB|RoCE)\b")
_VIA: Final = re.compile(r"\bvia NET/IB/(\d{1,3})\b")
_COMM: Final = re.compile(
    r"\bcomm (?P<comm>0x[0-9a-f]{1,16}) rank (?P<rank>\d{1,7}) n[rR]anks"
    r" (?P<size>\d{1,7})(?:.*?\bcommId (?P<id>0x[0-9a-f]{1,16}))?"
)
_CALL: Final = re.compile(
    r"(?P<op>[A-Z]\w{2,30}): opCount (?P<number>[0-9a-f]{1,15}) .*?\bcount (?P<count>\d{1,18})"
    r" datatype (?P<dtype>\d{1,2}) "
    r"op (?P<reduce>\d{1,10}) root (?P<root>\d{1,7}) comm (?P<comm>0x[0-9a-f]{1,16})"
    r"(?: \[nranks=(?P<size>\d{1,7})\])?"
)
_DTYPES: Final = (
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)
_REDUCE_OPS: Final = ("SUM", "PRODUCT", "MAX", "MIN", "AVG")
_CALLS_MAX: Final = 1_000_000
_WARNINGS_MAX: Final = 8  # of a process: the first ones are the nearest to the cause
_WARNING_MAX: Final = 400  # characters

_Process = tuple[str, str]
"""Host and pid."""


class NcclCall(NamedTuple):
    """A collective that a rank issued."""

    op: str  # wire op
    elements: int
    dtype: str  # "" if unknown
    reduce_op: str
    root: int  # rank in the communicator


class Communicator(NamedTuple):
    """A communicator, and what each of its ranks issued on it."""

    name: str
    ranks: tuple[int, ...]  # global ranks; empty if some of them are not known
    calls: dict[int, dict[int, NcclCall]]  # by global rank, by number
    met: int  # the number up to which no two ranks issued different ops, sizes or dtypes


class NcclPlace(NamedTuple):
    """A rank's place, from NCCL's lines."""

    host: str
    gpu: int  # index on the host, among the GPUs that the process sees
    nic: str  # the only network adapter that it used; empty: several, or none
    nics: tuple[str, ...]  # all adapters of its host that NCCL uses


@dataclass(slots=True)
class _Hardware:
    """The GPU and the network adapters of a process."""

    gpu: int
    names: dict[int, str] = field(default_factory=dict)  # of all adapters, by NCCL's number
    used: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Member:
    """A communicator of one process."""

    rank: int = -1  # in the communicator
    size: int = 0
    id: str = ""  # equal on all ranks; older versions print none
    order: int = 0  # among the process's communicators of this size
    calls: list[tuple[int, NcclCall]] = field(default_factory=list)  # by number, from 1
    sends: bool = False  # it has messages, which NCCL counts with the collectives


class NcclLines:
    """Collects lines of all processes in a log."""

    def __init__(self) -> None:
        self._members: dict[_Process, dict[str, _Member]] = defaultdict(dict)
        self._hardware: dict[_Process, _Hardware] = {}
        self._printed_ranks: dict[_Process, int] = {}
        self._count = 0
        self.warnings: dict[_Process, list[str]] = defaultdict(list)

    def add(self, line: str, rank: int = -1) -> None:
        """Parse a line. ``rank`` is that in its prefix, -1 if it has none."""
        head = _HEAD.search(line)
        if head is None:
            return
        process, text = (head["host"], head["pid"]), head["text"]
        if rank >= 0:
            self._printed_ranks[process] = rank
        if head["warning"]:
            if len(self.warnings[process]) < _WARNINGS_MAX:
                self.warnings[process].append(head["warning"][:_WARNING_MAX])
            return
        hardware = self._hardware.setdefault(process, _Hardware(int(head["gpu"])))
        if via := _VIA.search(text):
            hardware.used.add(int(via[1]))
        elif text.startswith("NET/IB"):
            hardware.names |= {int(number): name for number, name in _ADAPTERS.findall(text)}
        if call := _CALL.search(text):
            self._add_call(self._members[process].setdefault(call["comm"], _Member()), call)
        elif comm := _COMM.search(text):
            self._add_member(self._members[process], comm)

    def _add_member(self, members: dict[str, _Member], comm: re.Match[str]) -> None:
        member = members.setdefault(comm["comm"], _Member())
        if not member.size:
            member.order = sum(other.size == int(comm["size"]) for other in members.values())
        member.rank, member.size, member.id = (
            int(comm["rank"]),
            int(comm["size"]),
            comm["id"] or member.id,
        )

    def note_rank(self, pid: str, rank: int) -> None:
        """Note the rank of a process, as its launcher prints it; none if several have this pid."""
        known = [process for process in {*self._members, *self.warnings} if process[1] == pid]
        if len(known) == 1:
            self._printed_ranks.setdefault(known[0], rank)

    def _add_call(self, member: _Member, call: re.Match[str]) -> None:
        op = watchdog_wire_op(call["op"])
        member.size = member.size or int(call["size"] or 0)
        member.sends = member.sends or op in POINT_TO_POINT
        if op in POINT_TO_POINT or self._count >= _CALLS_MAX:
            return
        self._count += 1
        dtype, reduce_op = int(call["dtype"]), int(call["reduce"])
        member.calls.append(
            (
                int(call["number"], 16) + 1,
                NcclCall(
                    op,
                    int(call["count"]),
                    _DTYPES[dtype] if dtype < len(_DTYPES) else "",
                    _REDUCE_OPS[reduce_op] if reduce_op < len(_REDUCE_OPS) else "",
                    int(call["root"]),
                ),
            )
        )

    def ranks(self) -> dict[_Process, int]:
        """Return the global rank of each process: its rank in a communicator of the largest size,
        else the rank in its lines' prefix or from its launcher, unless several processes have that
        rank. If one process of that communicator and one rank are left, they belong together.
        """
        size, counts = self.world_size(), Counter(self._printed_ranks.values())
        printed = {
            process: rank for process, rank in self._printed_ranks.items() if counts[rank] == 1
        }
        largest = [
            (process, member.rank)
            for process, members in sorted(self._members.items())
            for member in members.values()
            if member.size == size
        ]
        known = printed | {process: rank for process, rank in largest if rank >= 0}
        left = {process for process, _ in largest} - {*known}
        free = set(range(size)) - {*known.values()}
        if len(left) == len(free) == 1:
            known[left.pop()] = free.pop()
        return known

    def places(self) -> dict[int, NcclPlace]:
        """Return where each rank runs, by its global rank."""
        found = {}
        for process, rank in self.ranks().items():
            hardware = self._hardware.get(process)
            if hardware is None:
                continue
            used = {hardware.names.get(number, "") for number in hardware.used}
            nic = used.pop() if len(used) == 1 else ""
            nics = tuple(name for _, name in sorted(hardware.names.items()))
            found[rank] = NcclPlace(process[0], hardware.gpu, nic, nics)
        return found

    def world_size(self) -> int:
        """Return the size of the largest communicator; 0 if there is none."""
        return max(
            (member.size for members in self._members.values() for member in members.values()),
            default=0,
        )

    def communicators(self) -> list[Communicator]:
        """Return the communicators on which at least two ranks issued collectives that can be
        aligned.
        """
        ranks = self.ranks()
        # of one size and id, or without an id of one order
        found = defaultdict[tuple[int, str, int], list[tuple[int, _Member]]](list)
        for process, members in sorted(self._members.items()):
            for member in members.values():
                if member.rank < 0 and member.size == self.world_size():
                    member.rank = ranks.get(process, -1)
                if process in ranks and member.size > 1:
                    key = member.size, member.id, 0 if member.id else member.order
                    found[key].append((ranks[process], member))
        largest_first = sorted(found.items(), key=lambda item: (-item[0][0], *item[0][1:]))
        communicators = [
            self._communicator(number, members) for number, (_, members) in enumerate(largest_first)
        ]
        return [one for one in communicators if one is not None]

    def _communicator(self, number: int, members: list[tuple[int, _Member]]) -> Communicator | None:
        """Return a communicator from its members and their global ranks; None if its collectives
        cannot be aligned. ``number`` names it if it has no id.
        """
        global_ranks = {member.rank: rank for rank, member in members}
        used = {rank: member for rank, member in members if member.calls}
        if len(global_ranks) < len(members) or len(used) < 2:
            return None  # several of one size that nothing tells apart, or nothing to compare
        size, name = members[0][1].size, members[0][1].id
        is_whole = len(global_ranks) == size
        ranks = tuple(global_ranks[rank] for rank in range(size)) if is_whole else ()
        if size == self.world_size():
            ranks = tuple(range(size))
        firsts = {member.calls[0][0] for member in used.values()}
        if len(firsts) > 1 and any(member.sends for member in used.values()):
            return None  # the numbers count messages, too, which ranks do not have alike
        begins_alike = len(firsts) == 1
        calls = {rank: _numbered(member.calls, begins_alike) for rank, member in used.items()}
        return Communicator(f"communicator {name or number}", ranks, calls, _met(calls))


def _numbered(calls: list[tuple[int, NcclCall]], begins_alike: bool) -> dict[int, NcclCall]:
    """Return calls by number. If the first one has the same number on all ranks, the others are
    counted from it: opCount also counts messages, so the gaps between its numbers differ between
    ranks.
    """
    if begins_alike:
        return dict(enumerate((call for _, call in calls), calls[0][0]))
    return dict(calls)


def _met(calls: dict[int, dict[int, NcclCall]]) -> int:
    """Return the number up to which no two ranks issued different ops, sizes or dtypes.

    Reduce op and root are not compared: NCCL prints both for every collective, also where they mean
    nothing. A number that a rank lacks is no difference: lines may be lost.
    """
    last = min(max(own) for own in calls.values())
    for number in range(max(min(own) for own in calls.values()), last + 1):
        issued = {call[:3] for own in calls.values() if (call := own.get(number)) is not None}
        if len(issued) > 1:
            return number - 1
    return last
