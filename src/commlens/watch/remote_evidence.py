"""Evidence that travels between the nodes of a job: black boxes, compressed, with the observations of their processes."""

from __future__ import annotations

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
from commlens.watch.snapshot import have_joined, log_without_records

_FAST = 1
ALL_RECORDS_UP_TO: Final = 512  # ranks; in a larger job, each rank sends fewer of its newest records
_RECORDS_MIN: Final = 64


class _Rank(msgspec.Struct):
    log: RankLog  # without records
    box: bytes  # compressed; empty if there is none that can be read


class NodeEvidence(msgspec.Struct):
    """What a node sent."""

    host: str
    ranks: list[SavedRank] = []  # with their boxes, as they are saved in a dump
    logs: list[RankLog] = []
    problems: list[str] = []  # what could not be read, in sentences


def pack(members: Sequence[Member], observations: dict[int, Observation]) -> bytes:
    """Pack the members' boxes.

    Args:
        members: of this node.
        observations: by pid.
    """
    joined = have_joined(members)
    ranks: list[_Rank] = []
    for member in members:
        box = b""
        if member.box is not None:
            try:
                box = zlib.compress(_newest(member.box, member.world_size), _FAST)
            except FormatError:
                box = b""
        log = log_without_records(member, joined=joined)
        log.observation = observations.get(member.pid, Observation())
        ranks.append(_Rank(log, box))
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
        place, log, box = each.log, each.log, b""
        try:
            box = _inflated(each.box) if each.box else b""
            if box:
                log = read_box(box, name=f"rank {place.rank}'s black box on {host}", captured_ns=place.captured_ns)
                log.observation = place.observation
        except (FormatError, zlib.error) as error:
            found.problems.append(str(error))
        log.job = ""  # nodes that meet in one store have one job, by whatever name: theirs is the reporter's
        found.logs.append(log)
        found.ranks.append(SavedRank(place.rank, place.pid, place.observation, box, place.captured_ns))
    return found


def _inflated(content: bytes) -> bytes:
    stream = zlib.decompressobj()
    box = stream.decompress(content, SIZE_MAX)
    if stream.unconsumed_tail:
        raise FormatError("A black box of another node is larger than any can be.")
    return box
