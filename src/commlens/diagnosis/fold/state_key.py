"""The state of a rank that waits in a collective, as a key that all ranks in the same state share.

Ranks share a key if they wait in the same collective, or in the same place of small groups of one
kind, with the same arguments, at the same lines, after the same number of records, the newest of
which are alike: the same ops in groups of one kind. All other ranks have none: those that do not
wait, have ended, failed or cannot be read are examined one by one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from commlens.model.collective import Channel, Collective, ProcessGroup, Stack, State, user_lines
from commlens.model.ranklog import RankLog

RECORDS: Final = 64
"""Newest records that must be alike."""
_DIGEST_BYTES: Final = 8
_UNEVEN: Final = frozenset({"all_to_all", "gather", "scatter", "all_gather", "reduce_scatter"})
"""Ops whose payload may differ between ranks, or between groups of one kind."""


def state_key(log: RankLog) -> bytes | None:
    """Return the key of a rank's state; None if the rank must be examined itself."""
    if _is_unusual(log) or log.lost_newest:
        return None
    newest = [op for op in log.collectives if op.index > log.issued - RECORDS]
    waits_in = blocking(log.collectives)
    if not waits_in or any(op.is_point_to_point or not op.sequence_number for op in waits_in):
        return None
    if any(op.state is State.FAILED for op in newest):
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
    stack = log.main_stack
    around = [
        _lines(stack.frames) if stack is not None else None,
        sorted({event.what for event in log.health.events}) if log.health is not None else [],
    ]
    return _digest(records) + _digest(around)


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
        or seen.is_stopped
        or seen.holds_gil
        or seen.throttled_fraction
        or any(call.state is not State.COMPLETED for call in log.setups)
    )


def _has_ended(log: RankLog) -> bool:
    return bool(
        log.observation.has_ended
        or log.closed
        or log.left
        or log.exception is not None
        or log.refusal is not None
    )


def blocking(ops: Sequence[Collective]) -> list[Collective]:
    """Return the ops in flight that a thread waits for, and the first one of a device."""
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
    """Return the part of a record that all ranks in the same state share: roots and peers by their
    place in the group.
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
