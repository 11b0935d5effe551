"""The timeline: the collectives of each rank over time, one lane per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from commlens.diagnosis.index.job_index import ChannelKey
from commlens.model.collective import Collective, LearnedHow, State
from commlens.model.grouping import grouped
from commlens.reports.verdict_page.data import Arrivals, ChannelRef, Lane, Ops, Timeline
from commlens.reports.verdict_page.job import PageJob, phrase
from commlens.text import (
    args_phrase,
    format_ranks,
    frame_phrase,
    group_label,
    members_text,
    rank_phrase,
)

T = TypeVar("T")

LANES_MAX = 48
_SPAN_MIN_US = 1000  # of the window around a fault
_SEEN_AT_ONCE = 16  # lanes; of more, those of the root cause come first
_OPS_MAX = 16_000
_OPS_OF_A_LANE = 400
_ARRIVALS_MAX = 4
_STATES = {
    State.COMPLETED: 0,
    State.ANNOUNCED: 1,
    State.ISSUED: 1,
    State.FAILED: 2,
    State.UNKNOWN: 3,
}
_FOUND_LATER = 4


class Index(Generic[T]):
    """Distinct values, numbered in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        """Return the value's number."""
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[T]:
        """The values by number."""
        return list(self._numbers)


def timeline(job: PageJob) -> Timeline:
    """Return the most relevant lanes, the last collectives of each, and the arrivals at the
    collectives that the findings name.
    """
    if not job.has_times:
        return Timeline()
    ranks = _lane_ranks(job)
    most = min(_OPS_OF_A_LANE, _OPS_MAX // max(1, len(ranks)))
    chosen = {rank: _newest_ops(job.index.views[rank].history, most) for rank in ranks}
    newest = max((op.announced_ns for ops in chosen.values() for op in ops), default=0)
    made = Timeline(left_out=len(job.index.views) - len(ranks))
    if not newest:
        return made
    zero, made.zero_is = _moment_of_the_fault(job) or (newest, "the last collective was issued")
    made.captured = max(
        _microseconds(max(view.now_ns for view in job.index.views.values()), zero),
        _microseconds(newest, zero),
    )
    made.captured_known = job.knows_capture_time
    made.notes = _notes(job, ranks)
    texts, channels = Index[str](), Index[ChannelKey]()
    made.arrivals = [
        found
        for key, number, _ in job.focus[:_ARRIVALS_MAX]
        if (found := _arrivals(job, key, number, zero, channels)) is not None
    ]
    made.lanes = [
        Lane(rank, job.role(rank), _columns(ops, zero, texts, channels))
        for rank, ops in chosen.items()
    ]
    groups = [job.index.channels[key].group for key in channels.values]
    made.channels = [ChannelRef(group_label(each), members_text(each.ranks)) for each in groups]
    made.texts = texts.values
    made.window = _window(made, chosen.values(), zero)
    if len(made.lanes) > _SEEN_AT_ONCE:
        made.lanes.sort(key=lambda lane: lane.role not in ("culprit", "awaited"))
    return made


def _notes(job: PageJob, ranks: Sequence[int]) -> list[str]:
    """Return what a reader has to know of the times."""
    notes = []
    if not job.knows_capture_time:
        notes.append(
            "These dumps do not say when they were taken: how long an operation has been in flight"
            " is unknown."
        )
    hosts = {job.index.views[rank].log.host for rank in ranks}
    if len(hosts) > 1:
        notes.append(
            f"The ranks ran on {len(hosts)} hosts, and times are those of each host's own clock:"
            " small differences mean nothing."
        )
    return notes


def _columns(
    ops: Sequence[Collective], zero: int, texts: Index[str], channels: Index[ChannelKey]
) -> Ops:
    """Return the collectives of a lane whose time is known, field by field."""
    known = [op for op in ops if op.announced_ns]
    return Ops(
        start=[_microseconds(op.announced_ns, zero) for op in known],
        end=[_microseconds(op.ended_ns, zero) for op in known],
        channel=[channels(op.channel.key) for op in known],
        number=[op.sequence_number for op in known],
        name=[texts(_name(op)) for op in known],
        asked=[texts(args_phrase(op)) for op in known],
        place=[texts(frame_phrase(op.source)) for op in known],
        state=[_FOUND_LATER if _was_found_later(op) else _STATES[op.state] for op in known],
    )


def _lane_ranks(job: PageJob) -> list[int]:
    """Return all ranks if they fit; else the culprits, and the first and last rank of each
    class.
    """
    ranks = sorted(job.index.views)
    if len(ranks) <= LANES_MAX:
        return ranks
    members = grouped((job.class_of[rank], rank) for rank in ranks)
    blamed = [rank for rank in ranks if job.role(rank) in ("culprit", "awaited")]
    wanted = [
        *blamed[: LANES_MAX // 2],
        *(rank for one in sorted(members) for rank in (members[one][0], members[one][-1])),
    ]
    focused = [rank for key, _, _ in job.focus[:1] for rank in key[2] if rank in job.index.views]
    return sorted(list(dict.fromkeys([*wanted, *focused, *ranks]))[:LANES_MAX])


def _newest_ops(history: Sequence[Collective], most: int) -> list[Collective]:
    """Return the last collectives, and the earlier ones in flight. A coalesced group is shown by
    the record that closes it.
    """
    ops = history[-4 * most :]
    closed = {op.coalescing_id for op in ops if op.coalescing_id and op.coalesced_members}
    shown = [op for op in ops if not (op.coalescing_id in closed and not op.coalesced_members)]
    return (
        [op for op in shown[:-most] if op.in_flight] + shown[-most:]
        if len(shown) > most
        else list(shown)
    )


def _was_found_later(op: Collective) -> bool:
    """Return whether its end is only known to lie before a moment at which it was looked for: torch
    waits for it in C++, as DDP does.
    """
    return (
        op.state is State.COMPLETED and op.learned_how is LearnedHow.POLL and not op.wait_ended_ns
    )


def _name(op: Collective) -> str:
    if not op.is_point_to_point:
        return op.op
    return f"{op.op} {'to' if op.op == 'send' else 'from'} {rank_phrase(op.peer)}"


def _microseconds(moment: int, zero: int) -> int:
    return (moment - zero) // 1000 if moment else -1 << 52


def _moment_of_the_fault(job: PageJob) -> tuple[int, str] | None:
    for key, number, _ in job.focus:
        ops = (job.op_of(rank, key, number) for rank in job.index.views)
        if found := [op for op in ops if op is not None and op.announced_ns]:
            first = min(found, key=lambda op: op.announced_ns)
            return first.announced_ns, f"the first rank issued {phrase(first)}"
    waits = [block.since_ns for block in job.graph.blocks.values() if block.since_ns]
    return (min(waits), "the first rank began to wait") if waits else None


def _arrivals(
    job: PageJob, key: ChannelKey, number: int, zero: int, channels: Index[ChannelKey]
) -> Arrivals | None:
    met: list[tuple[int, int]] = []
    absent: list[int] = []
    names: set[str] = set()
    for rank in key[2]:
        op = job.op_of(rank, key, number)
        if op is None:
            absent.append(rank)
        elif op.announced_ns:
            met.append((_microseconds(op.announced_ns, zero), rank))
            names.add(op.op)
    if not met:
        return None
    met.sort()
    name = names.pop() if len(names) == 1 else "collective"
    group = group_label(job.index.channels[key].group, "the default group")
    title = f"{name} #{number} of {group} [{members_text(key[2])}]"
    return Arrivals(
        title,
        channels(key),
        [rank for _, rank in met],
        [at for at, _ in met],
        format_ranks(absent),
    )


def _window(made: Timeline, lanes: Iterable[list[Collective]], zero: int) -> tuple[int, int]:
    """Return from when to when the page shows the timeline at first, in microseconds: a few
    collectives before the fault and a little after it, since the wait that follows is far longer
    than they are.
    """
    newest = [op for ops in lanes for op in ops[-12:] if op.announced_ns]
    starts = sorted({_microseconds(op.announced_ns, zero) for op in newest})
    if not starts:
        return (0, max(1, made.captured))
    first, last = starts[0], starts[-1]  # first is after the fault if nothing before it is known
    arrived = max((arrivals.at[-1] for arrivals in made.arrivals), default=0)
    span = max(_SPAN_MIN_US, last - first, arrived - first)
    end = max(last, 0) + max(1, span // 3)
    if made.captured > max(last, 0):
        end = min(end, made.captured)
    return first - max(1, span // 20), end
