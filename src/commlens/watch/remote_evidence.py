"""Evidence that travels between the nodes of a job: black boxes, compressed, with the observations of their processes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec

from commlens.blackbox import layout
from commlens.blackbox.reader import SIZE_MAX, OpenBox, read_box
from commlens.dumps.save import SavedRank
from commlens.errors import FormatError
from commlens.model.ranklog import Observation, RankLog
from commlens.watch.roster import Member

_FAST = 1
ALL_RECORDS_UP_TO: Final = 512  # ranks; in a larger job, each rank sends fewer of its newest records
_RECORDS_MIN: Final = 64


class _Rank(msgspec.Struct):
    rank: int
    world_size: int
    local_rank: int | None
    restart: int
    pid: int
    observation: Observation
    captured_ns: int
    box: bytes  # compressed; empty if it has none


class NodeEvidence(msgspec.Struct):
    """What a node sent."""

    host: str
    ranks: list[SavedRank] = []  # with their boxes, as they are saved in a dump
    logs: list[RankLog] = []
    problems: list[str] = []  # what could not be read, in sentences


def pack(members: Sequence[Member], observations: dict[int, Observation]) -> bytes:
    """Pack the members' boxes. A box that cannot be read travels as one that does not exist.

    Args:
        members: of this node.
        observations: by pid.
    """
    ranks: list[_Rank] = []
    for member in members:
        box = b""
        if member.box is not None:
            try:
                box = zlib.compress(_newest(member.box, member.world_size), _FAST)
            except FormatError:
                box = b""
        observation = observations.get(member.pid, Observation())
        place = (member.rank, member.world_size, member.local_rank, member.restart, member.pid)
        ranks.append(_Rank(*place, observation, time.time_ns(), box))
    return msgspec.msgpack.encode(ranks)


def _newest(box: OpenBox, world_size: int) -> bytes:
    """Return a copy of a box, in a large job with its newest records only, so that all ranks' together stay within some 100 MB."""
    content = box.copy()
    if world_size <= ALL_RECORDS_UP_TO:
        return content
    status = box.status()
    keep = max(_RECORDS_MIN, status.capacity * ALL_RECORDS_UP_TO // world_size)
    image = bytearray(content)
    blank = bytes(layout.RECORD_SIZE)
    for index in range(max(1, status.issued - status.capacity + 1), status.issued - keep + 1):
        at = layout.HEADER_SIZE + (index - 1) % status.capacity * layout.RECORD_SIZE
        image[at : at + layout.RECORD_SIZE] = blank
    return bytes(image)


def unpack(content: bytes, host: str) -> NodeEvidence:
    """Read what another node sent with :func:`pack`."""
    found = NodeEvidence(host)
    try:
        ranks = msgspec.msgpack.decode(content, type=list[_Rank])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return NodeEvidence(host, problems=[f"The evidence of node {host} could not be read: {error}."])
    for each in ranks:
        log: RankLog | None = None
        box = b""
        try:
            box = _inflated(each.box) if each.box else b""
            if box:
                log = read_box(box, name=f"rank {each.rank}'s black box on {host}", captured_ns=each.captured_ns)
        except (FormatError, zlib.error) as error:
            found.problems.append(str(error))
        if log is None:
            log = RankLog(
                rank=each.rank, world_size=each.world_size, host=host, pid=each.pid, local_rank=each.local_rank,
                restart=each.restart, captured_ns=each.captured_ns,
            )  # fmt: skip
        log.observation = each.observation
        found.logs.append(log)
        found.ranks.append(SavedRank(each.rank, each.pid, each.observation, box, each.captured_ns))
    return found


def _inflated(content: bytes) -> bytes:
    stream = zlib.decompressobj()
    box = stream.decompress(content, SIZE_MAX)
    if stream.unconsumed_tail:
        raise FormatError("A black box of another node is larger than any can be.")
    return box
