"""Evidence that travels between the nodes of a job: of each rank, its packed black box with the
newest records, and a log without records that has what was observed of its process.

How many records a rank sends depends on the size of the job: 131,072 of all ranks together, but at
least 16 of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.blackbox.reader import BoxStatus, read_box
from commlens.dumps.save import SavedRank
from commlens.errors import FormatError
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation, RankLog
from commlens.processes.observer import Observer
from commlens.watch.roster import Member, Roster
from commlens.watch.snapshot import have_joined, log_without_records, observe, one_run

# of all ranks together: 20 us each to read and diagnose; in a larger job, each rank sends fewer
RECORDS: Final = 1 << 17
HEAD_RECORDS: Final = 64  # of each rank, for a look of ``commlens status``
_MORE_RECORDS: Final = RECORDS // 8  # of the culprits' nodes, and of some that wait for them
_RECORDS_MIN: Final = 16
_FIRST_RECORDS_MIN: Final = 8
_EVENTS_SENT: Final = 100  # of a node's hardware, about 150 bytes each
LOOK_S: Final = 0.4  # how long processes are watched for ``commlens status``
_IN_FLIGHT_MAX: Final = 8  # shares that one rank may send, if its oldest record in flight is older


class _RankEvidence(msgspec.Struct):
    log: RankLog  # without records
    box: bytes  # packed; empty if there is none that can be read


class NodeEvidence(msgspec.Struct):
    """The evidence that a node sent."""

    host: str
    ranks: list[SavedRank] = []  # with their boxes, as they are saved in a dump
    logs: list[RankLog] = []
    problems: list[str] = []  # what could not be read, in sentences
    health: NodeHealth | None = None


def pack(
    members: Sequence[Member],
    observations: dict[int, Observation],
    records: int = 0,
    health: NodeHealth | None = None,
) -> bytes:
    """Pack the members' boxes.

    Args:
        members: of this node.
        observations: by pid.
        records: how many of each rank's newest records to pack, more if an older one is in flight;
            0: as many as a job of this size allows.
        health: the hardware of this node.
    """
    joined = have_joined(members)
    ranks: list[_RankEvidence] = []
    for member in members:
        box = b""
        if member.box is not None:
            share = records or records_of_each(member.world_size)
            with contextlib.suppress(FormatError):
                box = member.box.packed(newest=newest_records(member.box.status(), share))
        log = log_without_records(member, joined=joined)
        log.observation = observations.get(member.pid, Observation())
        if health is not None and not ranks:  # without the values that the events were made of
            log.health = msgspec.structs.replace(
                health, events=health.events[-_EVENTS_SENT:], values={}
            )
        ranks.append(_RankEvidence(log, box))
    return msgspec.msgpack.encode(ranks)


def pack_snapshot(folders: Sequence[Path], records: int) -> bytes:
    """Look at this node's ranks now, and pack so many of the newest records of each for ``commlens
    status`` on another node.
    """
    with contextlib.closing(Roster(folders)) as roster:
        observations = observe(roster, Observer(), window_s=LOOK_S)
        return pack(roster.current(), observations, records)


def records_of_each(ranks: int) -> int:
    """Return how many of its newest records each of all ranks may send."""
    return max(_RECORDS_MIN, RECORDS // max(ranks, 1))


def first_records_of_each(ranks: int) -> int:
    """Return how many of its newest records each of all ranks may send for a first look, after
    which some are asked for more.
    """
    return max(_FIRST_RECORDS_MIN, min(HEAD_RECORDS, RECORDS // 4 // max(ranks, 1)))


def more_records_of_each(ranks: int) -> int:
    """Return how many of its newest records each of some ranks may send, when all others have sent
    theirs.
    """
    return max(HEAD_RECORDS, _MORE_RECORDS // max(ranks, 1))


def newest_records(status: BoxStatus, share: int) -> int | None:
    """Return how many of a rank's newest records to read, the oldest one in flight among them;
    None: all.
    """
    if share >= min(status.capacity, status.issued):
        return None
    in_flight = status.issued - status.oldest_index + 1 if status.oldest_index else 0
    return min(max(share, in_flight), _IN_FLIGHT_MAX * share, status.capacity)


def pack_world(nodes: Sequence[tuple[str, bytes]]) -> bytes:
    """Pack what all nodes of a world sent with :func:`pack`, each with its host."""
    return msgspec.msgpack.encode(nodes)


def unpack_world(content: bytes, host: str) -> tuple[list[RankLog], list[str]]:
    """Read what the reporting node of another world sent with :func:`pack_world`: the ranks' logs,
    and what could not be read, in sentences.
    """
    try:
        nodes = msgspec.msgpack.decode(content, type=list[tuple[str, bytes]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [], [f"The evidence of another world, on {host}, could not be read: {error}."]
    found = [unpack(packed, name, keeps_job=True) for name, packed in nodes]
    logs = one_run([log for node in found for log in node.logs])
    return logs, [problem for node in found for problem in node.problems]


def unpack(content: bytes, host: str, *, keeps_job: bool = False) -> NodeEvidence:
    """Read what another node sent with :func:`pack`.

    Unless ``keeps_job``, the logs lose the name of their job: nodes that meet in one store have one
    job, whatever each calls it, and it has the reporter's name.
    """
    found = NodeEvidence(host)
    ranks: list[_RankEvidence] = []
    try:
        ranks = msgspec.msgpack.decode(content, type=list[_RankEvidence])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        found.problems.append(f"The evidence of node {host} could not be read: {error}.")
    for each in ranks:
        log = sent = each.log
        if each.box:
            name = f"rank {sent.rank}'s black box on {host}"
            try:
                log = read_box(each.box, name=name, captured_ns=sent.captured_ns)
                log.observation, log.health = sent.observation, sent.health
            except FormatError as error:
                found.problems.append(str(error))
        found.health = found.health or sent.health
        log.job = log.job if keeps_job else ""
        found.logs.append(log)
        found.ranks.append(
            SavedRank(sent.rank, sent.pid, sent.observation, each.box, sent.captured_ns)
        )
    return found
