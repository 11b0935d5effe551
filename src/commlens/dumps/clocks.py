"""Correct the times of hosts whose wall clocks differ, by the collectives that their ranks
completed together.

No rank can complete a collective that needs all ranks before each of them has issued it. Every such
collective bounds how far two clocks can be apart, from both sides; the tightest bounds of some
hundred collectives are a few milliseconds wide or less. A clock that is set while the job runs
makes no difference: all times of a black box are monotonic, with one offset to the wall clock.

If host A issues an all_reduce at 10.000 s and completes it at 10.004 s by its clock, and host B at
12.001 s and 12.003 s by its own, B's clock is ahead by 1.997 s at least (B issued before A
completed) and by 2.003 s at most: B's times are corrected by 2 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from commlens.model.collective import ChannelKey, Collective, State
from commlens.model.grouping import grouped
from commlens.model.ops import NEEDS_ALL
from commlens.model.ranklog import RankLog
from commlens.text import duration

_RANKS_PER_HOST: Final = 2  # whose collectives are compared: all ranks of a host have its clock
_WORTH_A_WORD_NS: Final = 100_000_000
_NEWEST: Final = 256  # collectives of each rank: clocks drift apart by some 10 us a second


class _Meeting(NamedTuple):
    """The times of a collective that ranks completed together, Unix ns."""

    issued_ns: int  # by the last rank
    completed_ns: int  # by the first one

    def joined(self, other: _Meeting) -> _Meeting:
        """Return the times over the ranks of both."""
        return _Meeting(
            max(self.issued_ns, other.issued_ns), min(self.completed_ns, other.completed_ns)
        )


_Meetings = dict[tuple[ChannelKey, int], _Meeting]
"""By channel and sequence number."""


def correct_clocks(logs: Sequence[RankLog]) -> list[str]:
    """Correct the times as :func:`align_clocks` does, and return what was found, in sentences."""
    return [
        f"The clock of {host} is {duration(abs(offset))} {'ahead' if offset > 0 else 'behind'}; its"
        " times are corrected."
        for host, offset in align_clocks(logs).items()
        if abs(offset) >= _WORTH_A_WORD_NS
    ]


def align_clocks(logs: Sequence[RankLog]) -> dict[str, int]:
    """Correct the times of hosts whose clocks provably differ from that of the first log's host.
    The logs are changed in place.

    A host keeps its times if it has completed no collective together with the others, or if its
    clock may be right.

    Returns:
        How far each of the corrected hosts' clocks was ahead, in ns.
    """
    by_host = grouped((log.host, log) for log in logs)
    if len(by_host) < 2:
        return {}
    first, *hosts = by_host
    aligned = _meetings(by_host[first])
    ahead: dict[str, int] = {}
    while hosts:
        waiting: list[str] = []
        for host in hosts:
            met = _meetings(by_host[host])
            bounds = _bounds(aligned, met)
            if bounds is None:
                waiting.append(host)
                continue
            least, most = bounds
            # contradictory bounds show nothing
            offset = 0 if least <= 0 <= most or least > most else (least + most) // 2
            if offset:
                ahead[host] = offset
                for log in by_host[host]:
                    _shift(log, -offset)
            for key, (issued_ns, completed_ns) in met.items():
                corrected = _Meeting(issued_ns - offset, completed_ns - offset)
                aligned[key] = corrected.joined(aligned.get(key, corrected))
        if len(waiting) == len(hosts):
            break  # nothing connects them with the others
        hosts = waiting
    return ahead


def _meetings(logs: Sequence[RankLog]) -> _Meetings:
    met: _Meetings = {}
    for log in [log for log in logs if log.collectives][:_RANKS_PER_HOST]:
        for op in log.collectives[-_NEWEST:]:
            completed = op.done_ns or op.wait_ended_ns
            if (
                op.state is not State.COMPLETED
                or op.op not in NEEDS_ALL
                or not completed
                or op.concurrent
            ):
                continue
            key = (op.channel.key, op.sequence_number)
            own = _Meeting(op.announced_ns, completed)
            met[key] = own.joined(met.get(key, own))
    return met


def _bounds(ours: _Meetings, theirs: _Meetings) -> tuple[int, int] | None:
    """Return by how much their clock is ahead of ours at least and at most, in ns."""
    pairs = [(ours[key], other) for key, other in theirs.items() if key in ours]
    if not pairs:
        return None
    return (
        max(other.issued_ns - mine.completed_ns for mine, other in pairs),
        min(other.completed_ns - mine.issued_ns for mine, other in pairs),
    )


_DURATIONS: Final = ("duration_ns", "device_ns")


def _shift(log: RankLog, by_ns: int) -> None:
    # the collectives, setups and store calls: all of its fields that hold ops
    for name in log.__struct_fields__:
        value = getattr(log, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Collective):
                _shift_fields(each, by_ns)
    _shift_fields(log, by_ns)
    _shift_fields(log.observation, by_ns)
    if log.health is not None:
        log.health = log.health.shifted(by_ns)
    log.nccl = _shifted(log.nccl, by_ns)
    for owner in (log, log.observation):
        owner.stacks = [
            msgspec.structs.replace(stack, taken_ns=stack.taken_ns + by_ns if stack.taken_ns else 0)
            for stack in owner.stacks
        ]


def _shift_fields(struct: Any, by_ns: int) -> None:
    """Shift the points in time of a struct."""
    for name, value in _times(struct, by_ns).items():
        setattr(struct, name, value)


def _shifted(value: Any, by_ns: int) -> Any:
    """Return a struct, and those in it, with their points in time shifted."""
    if isinstance(value, tuple):
        return tuple(_shifted(each, by_ns) for each in value)
    if not isinstance(value, msgspec.Struct):
        return value
    inner = {
        name: _shifted(getattr(value, name), by_ns)
        for name in value.__struct_fields__
        if isinstance(getattr(value, name), tuple)
    }
    return msgspec.structs.replace(value, **inner, **_times(value, by_ns))


def _times(struct: Any, by_ns: int) -> dict[str, int]:
    """Return the shifted points in time of a struct: the fields that end in ``_ns`` and are known,
    except durations.
    """
    return {
        name: max(1, value + by_ns)
        for name in struct.__struct_fields__
        if name.endswith("_ns") and name not in _DURATIONS and (value := getattr(struct, name))
    }
