"""Fold the ranks that are in the same state: examine some of them, and only count the others.

Of 10,000 ranks, rank 17 loads data and 9,999 wait for it in ``all_reduce #7``, at the same line and
with the same arguments. Diagnosis examines rank 17 and four of the others: "ranks 0-2,9999 wait for
rank 17", which is then said of all 9,999.

The groups of the examined ranks are cut down to the ranks that matter, the job is diagnosed as
always, and what was found is said of all ranks. Such a verdict counts only if it blames ranks that
were all examined: then no majority and no absence can depend on those that were not.

Ranks share the key of a state if they wait in the same collective, or in the same place of small
groups of one kind. Their arguments, lines and numbers of records must be the same, and their newest
records alike: the same ops in groups of one kind. All other ranks have none: those that do not
wait, have ended, failed or cannot be read are examined one by one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, get_type_hints

import msgspec

from commlens.model.cause import Cause, Hardware, Issued, Rank, RasWitness, Wait
from commlens.model.collective import Channel, Collective, ProcessGroup, Stack, State, user_lines
from commlens.model.ranklog import RankLog
from commlens.model.verdict import NOTHING_FOUND, Finding, Verdict

RECORDS: Final = 64
"""Newest records that must be alike."""
_DIGEST_BYTES: Final = 8
_UNEVEN: Final = frozenset({"all_to_all", "gather", "scatter", "all_gather", "reduce_scatter"})
"""Ops whose payload may differ between ranks, or between groups of one kind."""


# --- the key of a rank's state


def state_key(log: RankLog) -> bytes | None:
    """Return the key of a rank's state; None if the rank must be examined itself."""
    if _is_unusual(log):
        return None
    newest = [op for op in log.collectives if op.index > log.issued - RECORDS]
    waits_in = blocking(log.collectives)
    if not waits_in or any(op.is_point_to_point or not op.sequence_number for op in waits_in):
        return None
    if State.FAILED in {op.state for op in newest}:
        return None
    records = [
        log.world_size,
        log.issued,
        log.steps,
        log.script,
        [_in_flight(op, log) for op in waits_in],
        [_record(op, log) for op in newest],
        [[op.op, len(op.channel.group.all_ranks), op.state.value] for op in log.setups],
    ]
    return _digest(records) + _digest(_surroundings(log))


def _surroundings(log: RankLog) -> list[Any]:
    """Return the place of a rank's main thread, and the events on its node."""
    stack, events = log.main_stack, log.health.events if log.health is not None else ()
    lines = _lines(stack.frames) if stack is not None else None
    return [lines, sorted({event.what for event in events})]


def records_of(key: bytes) -> bytes:
    """Return the part of a key that is made of the rank's records."""
    return key[:_DIGEST_BYTES]


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=_DIGEST_BYTES).digest()


def _is_unusual(log: RankLog) -> bool:
    """Return whether more is known of a rank than that it runs and issues collectives."""
    seen = log.observation
    return bool(
        not log.initialised
        or _has_ended(log)
        or log.unrecorded
        or log.problems
        or log.twins
        or log.hazards
        or log.store_wait is not None
        or log.expecting is not None
        or log.head_lost
        or log.lost_newest
        or seen.is_stopped
        or seen.holds_gil
        or seen.throttled_fraction
        or any(call.state is not State.COMPLETED for call in log.setups)
    )


def _has_ended(log: RankLog) -> bool:
    """Return whether a process has ended, leaves, or failed."""
    return bool(
        log.observation.has_ended
        or log.closed
        or log.left
        or log.exception is not None
        or log.refusal is not None
    )


def blocking(ops: Sequence[Collective]) -> list[Collective]:
    """Return the ops in flight that a thread waits for, or has not returned from, and the first one
    in flight on a device.
    """
    found = [op for op in ops if op.in_flight and (op.waited_for or not op.returned_ns)]
    on_device = next((op for op in ops if op.in_flight and op.channel.runs_ahead), None)
    return [*found, on_device] if on_device is not None and on_device not in found else found


def is_small(group: ProcessGroup, world_size: int) -> bool:
    """Return whether a job has so many groups of this size that their ranks are compared by their
    place in the group: with the square root of its ranks, neither places nor groups are many.
    """
    return len(group.all_ranks) ** 2 <= world_size


def _in_flight(op: Collective, log: RankLog) -> list[Any]:
    """Return the facts about an op that a rank waits in: its record, its arguments, and the rank's
    place in a small group or the ranks of a large one.
    """
    group, args = op.channel.group, op.args
    if is_small(group, log.world_size):
        place = group.all_ranks.index(log.rank) if log.rank in group.all_ranks else -1
        which: list[Any] = [place]
    else:
        which = [group.name, array("q", group.all_ranks).tobytes()]
    return [
        which,
        group.incarnation,
        args.inputs,
        args.outputs,
        args.input_splits,
        args.output_splits,
        args.reduce_op,
        args.asynchronous,
        bool(op.waited_for),
        bool(op.returned_ns),
        op.learned_how.value,
        op.concurrent,
        op.module,
        _record(op, log),
    ]


def _record(op: Collective, log: RankLog) -> list[Any]:
    """Return the part of a record that all ranks in the same state share: the root by its place in
    the group, the peer by its distance, as in a ring.
    """
    group, args = op.channel.group.all_ranks, op.args
    own = group.index(log.rank) if log.rank in group else -1
    root = group.index(args.root) if args.root in group else -1
    peer = group.index(op.peer) - own if op.peer is not None and op.peer in group else 0
    payload = () if args.op in _UNEVEN else args.payload
    return [
        op.index,
        args.op,
        role(op.channel),
        op.sequence_number,
        [[spec.shape, spec.dtype] for spec in payload],
        root,
        peer,
        op.state.value,
        log.steps - op.step,
        op.coalesced_members,
        op.captured,
        _lines(op.stack),
    ]


def role(channel: Channel) -> tuple[object, ...]:
    """Return the properties that all groups of one kind share."""
    group = channel.group
    return (group.label, len(group.all_ranks), channel.device, channel.runs_ahead)


def _lines(stack: Stack) -> list[list[Any]]:
    return [[frame.file, frame.line] for frame in user_lines(stack)]


# --- which ranks are examined

EXAMINED: Final = 4
"""Ranks that are examined of each state: all if there are no more."""


class Alike(NamedTuple):
    """Ranks in one state."""

    examined: frozenset[int]  # those that stand for the others
    others: frozenset[int]  # not examined


def ranks_to_examine(states: Iterable[Collection[int]]) -> set[int]:
    """Return the lowest ranks of each state, and the highest one: it is most likely on another
    node, so a fault of one node is not taken for one of all ranks in the state.

    Args:
        states: the ranks in each.
    """
    found: set[int] = set()
    for ranks in states:
        found.update(sorted(ranks)[: EXAMINED - 1])
        found.add(max(ranks))
    return found


class AlikeRanks:
    """The ranks of a job that are not examined, because they are in the state of examined ones.

    Args:
        classes: ranks in one state each, without a rank in common.
    """

    def __init__(self, classes: Iterable[Alike]) -> None:
        self.classes = [each for each in classes if each.others]
        self.others: frozenset[int] = frozenset().union(*(each.others for each in self.classes))
        """The ranks that were not examined."""
        self.standing: frozenset[int] = frozenset().union(*(each.examined for each in self.classes))
        """The examined ranks that are in the state of others."""
        self.stands_for = {
            min(each.examined): len(each.others) for each in self.classes if each.examined
        }
        """By rank: the number of ranks that it stands for; of each state, one rank stands for
        all.
        """
        self._known: dict[frozenset[int], frozenset[int]] = {}

    def with_alike(self, ranks: Iterable[int]) -> frozenset[int]:
        """Return the ranks, and for each state whose examined ranks are all among them, the other
        ranks of that state.
        """
        given = frozenset(ranks)
        found = self._known.get(given)
        if found is None:
            more = [
                each.others for each in self.classes if each.examined and each.examined <= given
            ]
            found = self._known[given] = given.union(*more)
        return found


NONE_ALIKE: Final = AlikeRanks(())
"""Of a job whose ranks are all examined."""


def without_others(logs: Sequence[RankLog], alike: AlikeRanks) -> list[RankLog]:
    """Return the logs, with the ranks that are only counted taken out of their groups."""
    channels: dict[Channel, Channel] = {}
    by_id: dict[int, Channel] = {}
    cut: dict[tuple[int, ...], tuple[int, ...]] = {}

    def channel_of(op: Collective) -> Channel:
        before = op.channel
        if id(before) not in by_id:
            group = before.group
            ranks = group.all_ranks
            if ranks not in cut:
                cut[ranks] = tuple(rank for rank in ranks if rank not in alike.others)
            changed = msgspec.structs.replace(group, ranks=cut[ranks], whole=ranks)
            after = msgspec.structs.replace(before, group=changed)
            by_id[id(before)] = channels.setdefault(after, after)
        return by_id[id(before)]

    def cut_down(ops: Sequence[Collective]) -> list[Collective]:
        return [msgspec.structs.replace(op, channel=channel_of(op)) for op in ops]

    return [
        msgspec.structs.replace(
            log, collectives=cut_down(log.collectives), setups=cut_down(log.setups)
        )
        for log in logs
    ]


# --- whether a verdict on the examined ranks is one on all


def counts_for_all(verdict: Verdict, alike: AlikeRanks) -> bool:
    """Return whether a verdict on the examined ranks is one on all: it blames ranks that stand for
    no others, and says the same of all ranks in one state.
    """
    roots = [each for each in verdict.findings if each.root_cause] or verdict.findings[:1]
    return (
        verdict.kind not in NOTHING_FOUND
        and bool(roots)
        and all(_holds_for_all(each, alike) for each in roots)
    )


def _holds_for_all(finding: Finding, alike: AlikeRanks) -> bool:
    """Return whether a finding on the examined ranks is one on all: the ranks that it names stand
    for no others, and of each state, all examined ranks are victims, or none is.
    """
    named, victims = {*finding.culprits, *getattr(finding.cause, "ranks", ())}, set(finding.victims)
    blames_or_waits = bool(finding.culprits) or finding.kind == "waiting"
    if not named or not blames_or_waits or named & alike.standing:
        return False
    # else it would say of ranks that they are in a group which they are not in
    alike_are_members = all(
        alike.with_alike(ranks).difference(ranks) <= members
        for ranks, members in _in_groups(finding)
    )
    return alike_are_members and all(
        bool(each.examined) and (each.examined <= victims or not each.examined & victims)
        for each in alike.classes
    )


def standing_for_others(logs: Sequence[RankLog], alike: AlikeRanks) -> AlikeRanks:
    """Return the states without the examined ranks that wait in a small group with a rank that
    stands for no others: they may wait for that rank, while others in their state do not.

    Args:
        logs: of the examined ranks.
        alike: the states.
    """
    usual = alike.standing | alike.others
    apart = {
        log.rank
        for log in logs
        for op in blocking(log.collectives)
        if is_small(op.channel.group, log.world_size)
        and not usual.issuperset(op.channel.group.all_ranks)
    }
    return AlikeRanks(Alike(each.examined - apart, each.others) for each in alike.classes)


def awaited_others(logs: Sequence[RankLog], alike: AlikeRanks) -> set[int]:
    """Return the ranks that were not examined, but that an examined one may wait for or exchange
    messages with. Without their records, the wait would be followed to the wrong end.

    A rank in the same state as an examined rank has issued the same number of collectives, in
    groups of one kind.

    Args:
        logs: of the examined ranks.
        alike: the others.
    """
    by_rank = {log.rank: log for log in logs}
    issued = [
        (each.others, _issued(by_rank[min(each.examined)]) if each.examined else {})
        for each in alike.classes
    ]
    waits = {
        (op.channel, op.sequence_number): op
        for log in logs
        for op in log.collectives
        if op.in_flight and not op.is_point_to_point
    }
    found: set[int] = set()
    members: dict[tuple[int, ...], frozenset[int]] = {}
    for (channel, number), op in waits.items():
        ranks = op.channel.group.all_ranks
        others = members.setdefault(ranks, alike.others.intersection(ranks))
        for of_class, numbers in issued:
            if numbers.get(role(channel), 0) < number:
                found |= of_class & others
    return found | (_peers(logs) & alike.others)


def _peers(logs: Sequence[RankLog]) -> set[int]:
    """Return the ranks with which these exchange messages, or may: a receive from any source names
    none.
    """
    messages = [op for log in logs for op in log.collectives if op.is_point_to_point]
    groups = {op.channel.group.all_ranks for op in messages if op.peer is None}
    return {op.peer for op in messages if op.peer is not None}.union(*groups)


def _issued(log: RankLog) -> dict[tuple[object, ...], int]:
    """Return the highest sequence number that a rank issued, by the kind of group."""
    numbers: dict[tuple[object, ...], int] = {}
    for op in log.collectives:
        if not op.is_point_to_point:
            kind = role(op.channel)
            numbers[kind] = max(numbers.get(kind, 0), op.sequence_number)
    return numbers


def _in_groups(finding: Finding) -> Iterator[tuple[list[int], set[int]]]:
    """Yield ranks that the finding names in a group, with the ranks of that group. Ranks in one
    state need not have been in one group before.
    """
    cause, group = finding.cause, finding.group
    for wait in getattr(cause, "waits", ()):
        if (of := getattr(wait, "group", None)) is not None:
            yield wait.ranks, set(of.ranks)
    if group is not None:
        members = set(group.ranks)
        for issued in getattr(cause, "issued", ()):
            yield issued.ranks, members
        yield getattr(cause, "came", []), members


# --- the verdict on all ranks

_RANKS: Final = list[Rank]


def say_of_all(verdict: Verdict, alike: AlikeRanks) -> None:
    """Add to a verdict's victims, and to its waits, the ranks that are in the same state."""
    for finding in verdict.findings:
        finding.victims = sorted(alike.with_alike(finding.victims))
        if finding.cause is not None:
            finding.cause = _of_all(finding.cause, alike)
    if verdict.findings:
        first = verdict.findings[0]
        verdict.victims, verdict.cause = first.victims, first.cause


def _of_all(part: Any, alike: AlikeRanks) -> Any:
    """Return a cause, or a part of one, with all ranks that are in the same state."""
    if isinstance(part, (Hardware, RasWitness)):
        return part  # those ranks, whatever others are in their state
    hints = get_type_hints(type(part), include_extras=True)
    changed: dict[str, object] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if hints[name] == _RANKS and not (name == "ranks" and isinstance(part, Cause)):
            changed[name] = sorted(alike.with_alike(value))
        elif isinstance(value, list) and value and isinstance(value[0], (Wait, Issued)):
            changed[name] = [_of_all(each, alike) for each in value]
    return msgspec.structs.replace(part, **changed)
