"""How long devices wait in collectives, and how long the data takes, from durations alone.

On a device, a collective begins when its own rank arrives and ends for all members together. So the
member that arrives last has the shortest duration, which is the time of the transfer; what the
others' durations are longer, they waited. No clock in common is needed, and nothing is asked of a
device. A message waits for its peer in the same way. Its whole duration counts as a wait: stages of
a pipeline have different numbers of messages, so if the time of the data were taken off each, the
stage with most messages would seem to be late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import inf
from statistics import median
from typing import Final, NamedTuple

from msgspec.structs import replace

from commlens.model.collective import ChannelKey, Collective, ProcessGroup
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog
from commlens.model.spans import Span

_FEW: Final = 0.05  # of the collectives: their records or durations may be lost
LEAST: Final = 8  # collectives of one kind, from which their time is told
SLOWER: Final = 1.3
WINDOWS: Final = 5  # in a row, that show how long transfers take
WINDOWS_KEPT: Final = 120
# between the call of a message and the wait for it: in so short a time, a thread launches no work
_AT_ONCE_NS: Final = 100_000


class TransferKind(NamedTuple):
    """What decides how long a transfer takes in one group."""

    op: str
    numel: int  # elements that one rank contributes
    dtype: str
    members: int


class TimedCollective(NamedTuple):
    """A collective on a device with the durations that its members measured, or a message."""

    key: ChannelKey
    op: Collective  # as one member recorded it
    waited_ns: dict[int, int]  # by rank: for the last member
    transfer_ns: int  # 0: not known: a message, or some members are on other nodes
    data_ns: int = 0  # of a message's wait: as long as its data takes at the job's best rate

    @property
    def kind(self) -> TransferKind:
        """The kind of its transfer."""
        payload = self.op.args.payload
        return TransferKind(
            self.op.op, _numel(self.op), payload[0].dtype if payload else "", len(self.key[2])
        )


def is_on_device(op: Collective) -> bool:
    """Return whether a collective ran on a device, and is not known to be there still."""
    return op.channel.runs_ahead and not op.captured and not op.in_flight


def timed_until(log: RankLog) -> int:
    """Return until when a rank's durations are known: the moment (Unix ns) of its newest collective
    with one, or of its newest record if nothing of it runs on a device; 0 if none is known.
    """
    on_device = [op for op in log.collectives if op.channel.runs_ahead and not op.captured]
    if not on_device:
        return log.captured_ns
    return max((op.announced_ns + 1 for op in on_device if op.duration_ns is not None), default=0)


def is_message(op: Collective) -> bool:
    """Return whether a record is of a message, or closes a batch of messages."""
    return op.is_point_to_point or (op.coalesced_members > 0 and not op.sequence_number)


def are_timed(ops: Iterable[Collective]) -> bool:
    """Return whether the durations of nearly all collectives and messages on a device are known.

    Members of a coalesced group need none: the record that closes the group has it.
    """
    seen = {True: 0, False: 0}  # messages, and collectives
    unknown = {True: 0, False: 0}
    for op in ops:
        if is_on_device(op) and (op.coalesced_members or not op.coalescing_id):
            seen[is_message(op)] += 1
            unknown[is_message(op)] += op.duration_ns is None
    return all(unknown[each] <= _FEW * seen[each] for each in unknown)


def timed_collectives(logs: Sequence[RankLog], window: Span) -> list[TimedCollective]:
    """Return the collectives on devices that all their members in the logs issued in a window (Unix
    ns), and the messages that they received, as far as their durations are known.
    """
    by_number: dict[tuple[ChannelKey, int], dict[int, Collective]] = defaultdict(dict)
    messages: list[tuple[int, Collective]] = []
    here: set[int] = set()
    for log in logs:
        here.add(log.rank)
        for op in _waits_on_device(log, window):
            if is_message(op):
                messages.append((log.rank, op))
            else:
                by_number[op.channel.key, op.sequence_number][log.rank] = op
    whole = {key: here.issuperset(key[2]) for key, _ in by_number}
    found = [*_timed_messages(messages), *(_sent_messages(logs, window) if messages else ())]
    for (key, _), by_rank in by_number.items():
        durations = {rank: op.duration_ns or 0 for rank, op in by_rank.items()}
        op = next(iter(by_rank.values()))
        if not whole[key]:
            found.append(TimedCollective(key, op, durations, 0))
        elif len(by_rank) == len(key[2]):
            transfer = min(durations.values())
            waited = {rank: duration - transfer for rank, duration in durations.items()}
            found.append(TimedCollective(key, op, waited, transfer))
    return found


def _waits_on_device(log: RankLog, window: Span) -> Iterator[Collective]:
    """Yield what a rank issued in a window, waits for on its device, and took a known time there:
    collectives, receives, and the sends that it waits for at once. While another send waits for its
    receiver, the rank goes on.
    """
    begin, end = window
    receives = 0  # the batch of the newest receive
    for op in log.collectives:
        if op.op == "recv":
            receives = op.coalescing_id
        if op.duration_ns is None or not begin <= op.announced_ns < end or not is_on_device(op):
            continue
        receives_data = op.op == "recv" or op.coalescing_id == receives > 0
        is_waited_at_once = 0 <= op.wait_began_ns - op.returned_ns < _AT_ONCE_NS
        if receives_data or not is_message(op) or is_waited_at_once:
            yield op


def _timed_messages(messages: Sequence[tuple[int, Collective]]) -> list[TimedCollective]:
    """Return messages with the time for which their rank was in them."""
    known = grouped((_numel(op), op.duration_ns or 0) for _, op in messages)
    rates = (numel / max(1, sorted(took)[len(took) // 10]) for numel, took in known.items())
    best = max(rates, default=0.0) or inf
    return [
        TimedCollective(
            op.channel.key,
            op,
            {rank: op.duration_ns or 0},
            0,
            min(op.duration_ns or 0, round(_numel(op) / best)),
        )
        for rank, op in messages
    ]


def _sent_messages(logs: Iterable[RankLog], window: Span) -> Iterator[TimedCollective]:
    """Yield how long the data of each message took, if both ranks recorded how long they were in
    the message: the rank that came last was in it only for that time.
    """
    ends: dict[tuple[ChannelKey, int], dict[str, tuple[Collective, int]]] = defaultdict(dict)
    for log in logs:
        for op, ns in _messages_alone(log, window):
            ranks = (log.rank, op.peer or 0)[:: 1 if op.op == "send" else -1]
            name, device = op.channel.key[:2], op.channel.key[3]
            ends[ChannelKey((*name, ranks, device)), op.sequence_number][op.op] = op, ns
    for (key, _), both in ends.items():
        if len(both) == 2:
            yield TimedCollective(key, both["recv"][0], {}, min(ns for _, ns in both.values()))


def _messages_alone(log: RankLog, window: Span) -> Iterator[tuple[Collective, int]]:
    """Yield the messages that a rank issued in a window, and for how long they were on its device;
    of a batch, only if it has one message.
    """
    begin, end = window
    message: Collective | None = None
    for op in log.collectives:
        if op.is_point_to_point:
            message = op
        if message is None or op.duration_ns is None or op.coalescing_id != message.coalescing_id:
            continue
        if begin <= op.announced_ns < end and op.coalesced_members <= 1 and is_on_device(op):
            yield message, op.duration_ns


def _numel(op: Collective) -> int:
    return sum(spec.numel for spec in op.args.payload)


class DeviceTimes(NamedTuple):
    """Where the time of the ranks' devices went, ns by rank."""

    waited: dict[int, int]  # for other ranks
    sent: dict[int, int]  # in transfers


def device_times(timed: Iterable[TimedCollective], edges: Sequence[int]) -> list[DeviceTimes]:
    """Return for how long each rank's device waited for other ranks between any two edges (Unix ns)
    that follow one another. Of a message, and of a collective with members on other nodes, the
    whole duration counts.
    """
    found = [DeviceTimes(defaultdict(int), defaultdict(int)) for _ in edges[1:]]
    for each in timed:
        times = found[bisect_right(edges, each.op.announced_ns) - 1]
        for rank, ns in each.waited_ns.items():
            times.waited[rank] += ns
            times.sent[rank] += each.transfer_ns
    return found


class UsualTransfer(NamedTuple):
    """How long the transfers of one kind take in one group."""

    group: ProcessGroup
    ns: float  # the median
    times: int


def usual_transfers(
    timed: Iterable[TimedCollective],
) -> dict[TransferKind, dict[ChannelKey, UsualTransfer]]:
    """Return how long transfers of each kind took in each group. Kinds of which a group had fewer
    than :data:`LEAST` are left out.
    """
    found: dict[TransferKind, dict[ChannelKey, list[int]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[ChannelKey, ProcessGroup] = {}
    for each in timed:
        if each.transfer_ns:
            found[each.kind][each.key].append(each.transfer_ns)
            if each.key not in groups:
                group, ranks = each.op.channel.group, each.key[2]
                is_whole = group.ranks == ranks  # else the two of a message
                groups[each.key] = group if is_whole else replace(group, ranks=ranks, whole=())
    return {
        kind: {key: UsualTransfer(groups[key], median(ns), len(ns)) for key, ns in each.items()}
        for kind, each in found.items()
        if min(map(len, each.values())) >= LEAST
    }


class SlowLink(NamedTuple):
    """A group whose transfers take longer than the same transfers of its sibling groups."""

    group: ProcessGroup
    kind: TransferKind  # the one with the largest loss
    ratio: float
    lost_ns: float  # in the window, by all its kinds together


def find_slow_link(logs: Sequence[RankLog], window: Span, ranks: Iterable[int]) -> SlowLink | None:
    """Return the group of some of the ``ranks`` alone whose transfers cost most against its
    siblings: groups of as many members that do the same. None if there is none.
    """
    inside, groups = {*ranks}, {}
    lost: dict[ChannelKey, list[tuple[float, float, TransferKind]]] = defaultdict(list)
    for kind, each in usual_transfers(timed_collectives(logs, window)).items():
        for key, own in each.items():
            siblings = [other.ns for at, other in each.items() if at != key]
            if siblings and inside.issuperset(key[2]):
                usual, groups[key] = median(siblings), own.group
                loss = max(0.0, own.ns - usual) * own.times
                lost[key].append((loss, own.ns / max(usual, 1.0), kind))
    totals = {key: sum(loss for loss, _, _ in losses) for key, losses in lost.items()}
    if not totals:
        return None
    worst = max(totals, key=lambda key: totals[key])
    _, ratio, kind = max(lost[worst])
    return SlowLink(groups[worst], kind, ratio, totals[worst])


class SlowerTransfers(NamedTuple):
    """Transfers of one kind in one group that take longer than they did before in this job."""

    group: ProcessGroup
    kind: TransferKind
    now_ns: float
    best_ns: float
    share: float  # of the time that this costs
    since_ns: int  # Unix
    is_alone: bool  # other groups do the same, and there it takes no longer than before


class TransferTrend:
    """How long transfers take in the course of a job."""

    def __init__(self) -> None:
        # a window's begin (Unix ns), the median of its transfers in ns, and their share of the time
        self._seen: dict[tuple[TransferKind, ChannelKey], list[tuple[int, float, float]]] = {}
        self._groups: dict[ChannelKey, ProcessGroup] = {}

    def add(self, timed: Sequence[TimedCollective], windows: Sequence[Span]) -> None:
        """Add the transfers of some windows."""
        for begin, end in windows:
            inside = [each for each in timed if begin <= each.op.announced_ns < end]
            for kind, groups in usual_transfers(inside).items():
                for key, (group, ns, times) in groups.items():
                    self._groups[key] = group
                    seen = self._seen.setdefault((kind, key), [])
                    seen.append((begin, ns, ns * times / (end - begin)))
                    del seen[:-WINDOWS_KEPT]

    def slower(self) -> SlowerTransfers | None:
        """Return the transfers that cost most against the best five windows of this job, if they
        have been slower in each of the newest five; None if there are none.
        """
        found = [self._slower(*each) for each in self._seen]
        return max(filter(None, found), key=lambda each: each.share, default=None)

    def _slower(self, kind: TransferKind, key: ChannelKey) -> SlowerTransfers | None:
        seen = self._seen[kind, key]
        best = self._best(kind, key)
        slow = [*takewhile(lambda each: each[1] > SLOWER * best, reversed(seen))]
        if not best or len(slow) < WINDOWS:
            return None
        now_ns = median(ns for _, ns, _ in slow[:WINDOWS])
        share = median(share for _, _, share in slow[:WINDOWS]) * (1 - best / now_ns)
        siblings = [
            (ns[-1][1], self._best(*other))
            for other, ns in self._seen.items()
            if other[0] == kind and {*other[1][2]} != {*key[2]}
        ]
        known = [(last, usual) for last, usual in siblings if usual]
        return SlowerTransfers(
            self._groups[key],
            kind,
            now_ns,
            best,
            share,
            slow[-1][0],
            bool(known) and all(last <= SLOWER * usual for last, usual in known),
        )

    def _best(self, kind: TransferKind, key: ChannelKey) -> float:
        """Return the lowest median of five windows in a row, in ns; 0 if there are no five."""
        times = [ns for _, ns, _ in self._seen[kind, key]]
        rows = (times[at : at + WINDOWS] for at in range(len(times) - WINDOWS + 1))
        return min(map(median, rows), default=0.0)


def payload_by_place(log: RankLog, window: Span) -> Mapping[tuple[object, ...], float]:
    """Return the elements that a rank contributed to the collectives on a device that it issued
    from each line in a window.
    """
    begin, end = window
    found: dict[tuple[object, ...], float] = defaultdict(float)
    for op in log.collectives:
        if op.channel.runs_ahead and begin <= op.announced_ns < end:
            found[op.op, op.call_lines] += _numel(op)
    return found
