"""Convert a black box's log to columns, the one source of all exports."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from commlens.formats.columns import COMPLETED, DTYPES, RETIRED, SCHEDULED, RankColumns
from commlens.model.collective import Channel, CollectiveArgs, Stack, State
from commlens.model.ranklog import RankLog

_STATES = {
    State.ANNOUNCED: SCHEDULED,
    State.ISSUED: SCHEDULED,
    State.COMPLETED: COMPLETED,
    State.FAILED: RETIRED,
    State.UNKNOWN: RETIRED,
}


def columns_from_log(log: RankLog) -> RankColumns:
    """Return a log's collectives as columns, without waits, threads, steps and errors, which only a
    black box has.

    If the default group was destroyed and created again, later groups get ``@1``, ``@2``, ... after
    their names, since torch reuses the names.
    """
    channels: dict[tuple[object, ...], int] = {}
    args: dict[CollectiveArgs, int] = {}
    stacks: dict[Stack, int] = {}
    columns = RankColumns(
        rank=log.rank,
        world_size=log.world_size,
        host=log.host,
        job=log.job,
        source=log.source,
        origin="commlens",
        version=log.versions.get("commlens", ""),
        captured_ns=log.captured_ns,
        problems=list(log.problems),
        lost_entries=log.lost_newest,
    )
    # in the order of DTYPES: a tuple a record is faster than names
    rows: list[tuple[int, ...]] = []
    message_batches = {
        op.coalescing_id for op in log.collectives if op.coalescing_id and op.is_point_to_point
    }
    for op in log.collectives:
        # the description tells groups apart that had one name after the other
        key = (*op.channel.key, op.channel.group.description)
        if key not in channels:
            channels[key] = len(channels)
            columns.channels.append(_with_unique_name(op.channel))
        rows.append(
            (
                # channel, args_index, stack, sequence
                channels[key],
                args.setdefault(op.args, len(args)),
                stacks.setdefault(op.stack, len(stacks)) if op.stack else -1,
                op.sequence_number,
                # record_id, op_id
                op.index - 1,
                op.index,
                # state, retired, p2p, peer
                _STATES[op.state],
                op.state in (State.COMPLETED, State.FAILED, State.UNKNOWN),
                op.is_point_to_point or op.coalescing_id in message_batches,
                -1 if op.peer is None else op.peer,
                # created_ns, started_ns, completed_ns, duration_ns, timeout_ms
                op.announced_ns,
                op.entered_ns,
                op.done_ns,
                -1 if op.duration_ns is None else op.duration_ns,
                int(log.timeout_s * 1000),
                # coalesced, closes
                op.coalescing_id,
                op.coalesced_members > 0,
            )
        )
    columns.args, columns.call_stacks = list(args), list(stacks)
    if rows:
        # Numbers of a damaged box may be too large for a column: numpy wraps those of an array, but
        # raises for those of a list.
        columns.set_columns(dict(zip(DTYPES, map(np.array, zip(*rows, strict=True)), strict=True)))
    columns.groups = list(columns.channels)
    return columns


def _with_unique_name(channel: Channel) -> Channel:
    group = channel.group
    return (
        replace(channel, group=replace(group, name=f"{group.name}@{group.incarnation}"))
        if group.incarnation
        else channel
    )
