"""Interpret a Flight Recorder table: process groups, operations, states, coalesced groups, and the
rank that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from commlens.formats.columns import COMPLETED, RETIRED, Integers, RankColumns, StackTable, Status
from commlens.formats.flight_recorder.names import (
    ProfilingName,
    dtype_of,
    has_too_many,
    parse_ranks,
    read_name,
)
from commlens.formats.flight_recorder.table import Signature, Table
from commlens.model.collective import Channel, CollectiveArgs, ProcessGroup, TensorSpec
from commlens.model.limits import WORLD_MAX
from commlens.model.ops import UNKNOWN_DTYPE
from commlens.text import TEXT_MAX, clean

KNOWN_VERSIONS: Final = frozenset(f"2.{minor}" for minor in range(11))
_FIRST_TENSOR_ONLY: Final = frozenset(f"2.{minor}" for minor in range(4))
"""Versions in which the sizes of an all_to_all of lists are those of the first tensors, and nothing
tells it from one of whole tensors.
"""
_DEFAULT_GROUP: Final = "default_pg"
_INTEGER_MAX: Final = 1 << 62
_DIMENSIONS_MAX: Final = 64  # of a tensor in torch


def columns_from_table(table: Table, source: str) -> RankColumns:
    """Return the table's entries as columns that can be compared across ranks."""
    columns = RankColumns(source=source, version=_text(table.about.get("version")))
    columns.problems += [*_problems(table, columns.version), *_clean_texts(table)]
    columns.lost_entries = table.truncated or table.malformed > 0 or table.unknown_states > 0
    config = _config(table.about.get("pg_config"))
    columns.problems += _too_large(table.about.get("pg_config"))
    names = [read_name(name) for name in table.names]
    length = len(table)

    group, name = _ints(table.group, "int32", length), _ints(table.name, "int32", length)
    channel, columns.channels = _channels(table, group, name, names, config)
    args_index, columns.args = _args(
        name, _ints(table.signature, "int32", length), names, table.signatures
    )
    if columns.version in _FIRST_TENSOR_ONLY:
        columns.args = [
            msgspec.structs.replace(one, inputs=(), outputs=()) if one.op == "all_to_all" else one
            for one in columns.args
        ]
    columns.stacks = StackTable(table.frames, table.stacks)
    retired = _ints(table.retired, "bool", length)
    state = _ints(table.state, "uint8", length).copy()
    native = np.array([text.startswith("nccl:") for text in table.names] or [False])
    failed = native[name] if length else retired  # NCCL retires an op that completed or timed out
    state[(state != COMPLETED) & retired & ~failed] = RETIRED
    numbers = _Numbers(
        _ints(table.collective_seq_id, "int64", length), _ints(table.p2p_seq_id, "int64", length)
    )
    record_id = _ints(table.record_id, "int64", length)
    closes = _which(names, name, lambda one: one.closes)
    lost = columns.lost_entries or bool(length and record_id[0] > 0)
    is_message = _ints(table.is_p2p, "bool", length) | _which(
        names, name, lambda one: one.own_rank is not None
    )
    is_p2p = _closed_batches(channel, is_message, numbers, closes, lost=lost)
    sequence = np.where(is_p2p & (numbers.message >= 0), numbers.message, numbers.collective)
    if unnumbered := int((~is_p2p & (sequence < 0)).sum()):
        columns.problems.append(
            f"{unnumbered} entries have no readable sequence number and are compared with no others"
        )
        columns.lost_entries = True
    coalesced = _coalesced(channel, is_p2p, sequence, closes)
    completed = np.maximum(_ints(table.completed_ns, "int64", length), 0)
    _end_with_their_group(coalesced, closes, state, completed)
    duration = _ints(table.duration_ms, "float64", length)
    columns.set_columns(
        {
            "channel": channel,
            "args_index": args_index,
            "stack": _ints(table.stack, "int32", length),
            "sequence": sequence,
            "record_id": record_id,
            "op_id": _ints(table.op_id, "int64", length),
            "state": state,
            "retired": retired,
            "p2p": is_p2p,
            "peer": _peers(channel, name, names, columns.channels),
            "created_ns": np.maximum(_ints(table.created_ns, "int64", length), 0),
            "started_ns": np.maximum(_ints(table.started_ns, "int64", length), 0),
            "completed_ns": completed,
            "duration_ns": np.where(duration >= 0, duration * 1e6, -1.0).astype("int64"),
            "timeout_ms": np.maximum(_ints(table.timeout_ms, "int64", length), 0),
            "coalesced": coalesced,
            "closes": closes,
        }
    )
    backends = {one.backend for one in names}
    columns.origin = "gloo-recorder" if backends and backends <= {"gloo"} else "flight-recorder"
    columns.groups = [_channel(key, "", "", config) for key in config.ranks if key[0]]
    columns.status = _status(table.about.get("pg_status"))
    columns.status_groups = _status_groups(columns, _ints(table.pg_id, "int64", length), channel)
    _infer_rank(columns, channel, name, names)
    return columns


def _ints(column: Any, dtype: str, length: int) -> Integers:
    """Return a column as an array. 64-bit integers that no recorder writes become -1, so that
    differences do not overflow.
    """
    packed = isinstance(column, (bytes, bytearray, memoryview))
    values: Integers = np.frombuffer(column, dtype, length) if packed else np.asarray(column, dtype)
    if dtype == "int64" and len(values) and (values.min() < -1 or values.max() > _INTEGER_MAX):
        values = np.where((values < -1) | (values > _INTEGER_MAX), -1, values)
    return values


def _text(value: Any) -> str:
    return clean(value) if isinstance(value, str) and len(value) < 64 else ""


def _clean_texts(table: Table) -> list[str]:
    """Replace the texts that not every output can hold. Return a problem if texts were cut."""
    longest = 0

    def cleaned(text: str) -> str:
        nonlocal longest
        longest = max(longest, len(text))
        return clean(text)

    table.names = [cleaned(name) for name in table.names]
    table.groups = [(cleaned(name), cleaned(description)) for name, description in table.groups]
    table.frames = [
        (cleaned(file), line, cleaned(function)) for file, line, function in table.frames
    ]
    return (
        [f"texts of up to {longest} characters were cut to {TEXT_MAX}"]
        if longest > TEXT_MAX
        else []
    )


def _problems(table: Table, version: str) -> list[str]:
    found = []
    if table.truncated:
        found.append(
            "the file ends in the middle: it was cut off while it was written or copied, and"
            f" {len(table)} whole entries were read"
        )
    if table.malformed:
        found.append(f"{table.malformed} entries are malformed and were skipped")
    if table.unknown_states:
        found.append(f"{table.unknown_states} entries are in an unknown state and were skipped")
    if version not in KNOWN_VERSIONS and (version or not table.truncated):
        found.append(f"the format version {version or '(none)'} is unknown; it was read like 2.10")
    return found


_Key = tuple[str, str]


class _Config(NamedTuple):
    ranks: dict[_Key, tuple[int, ...]]  # global ranks by name and description
    by_name: dict[str, list[tuple[str, tuple[int, ...]]]]  # descriptions and global ranks


def _config(value: Any) -> _Config:
    """Return the process groups. Native gloo has one group without a name."""
    config = _Config({}, {})
    if isinstance(value, dict):
        for key, about in value.items():
            if isinstance(key, str) and isinstance(about, dict):
                ranks = about.get("ranks")
                name, description = clean(key), _description(about.get("desc"))
                config.ranks[name, description] = (
                    parse_ranks(ranks) if isinstance(ranks, str) else ()
                )
    for (name, description), members in config.ranks.items():
        config.by_name.setdefault(name, []).append((description, members))
    return config


def _too_large(value: Any) -> list[str]:
    """Return a problem if groups list more ranks than a job has."""
    lists = (
        [about.get("ranks") for about in value.values() if isinstance(about, dict)]
        if isinstance(value, dict)
        else []
    )
    longest = max(
        (ranks.count(",") + 1 for ranks in lists if isinstance(ranks, str) and has_too_many(ranks)),
        default=0,
    )
    return (
        [
            f"a group lists {longest:,} ranks, more than any job has ({WORLD_MAX:,}): its ranks are"
            " left out"
        ]
        if longest
        else []
    )


def _description(value: Any) -> str:
    """Return a group's description; torch writes "undefined" for none."""
    return clean(value) if isinstance(value, str) and value != "undefined" else ""


@lru_cache(maxsize=65536)
def _interned_channel(
    name: str, description: str, ranks: tuple[int, ...], backend: str, device: str
) -> Channel:
    return Channel(
        ProcessGroup(name=name, ranks=ranks, description=description, backend=backend), device
    )


def _channel(key: _Key, backend: str, device: str, config: _Config) -> Channel:
    ranks = config.ranks.get(key)
    if ranks is None:  # one of the two places may lack the description
        same = [
            found
            for description, found in config.by_name.get(key[0], ())
            if not (description and key[1])
        ]
        ranks = same[0] if len(same) == 1 else ()
    return _interned_channel(key[0], key[1], ranks, backend, device)


def _channels(
    table: Table, group: Integers, name: Integers, names: list[ProfilingName], config: _Config
) -> tuple[Integers, list[Channel]]:
    """Return a channel per group and backend, and each entry's index into them."""
    if not len(group):
        return np.zeros(0, "int32"), []
    kinds: dict[tuple[str, str], int] = {}
    kind = np.array([kinds.setdefault((one.backend, one.device), len(kinds)) for one in names])
    codes, index = _distinct(group.astype("int64") * len(kinds) + kind[name])
    by_number = list(kinds)
    channels = []
    for code in codes.tolist():
        backend, device = by_number[code % len(kinds)]
        group_name, description = table.groups[code // len(kinds)]
        channels.append(_channel((group_name, _description(description)), backend, device, config))
    return index, channels


def _args(
    name: Integers, signature: Integers, names: list[ProfilingName], signatures: list[Signature]
) -> tuple[Integers, list[CollectiveArgs]]:
    if not len(name):
        return np.zeros(0, "int32"), []
    ops: dict[tuple[str, str, str], int] = {}
    op = np.array([ops.setdefault((one.op, one.raw, one.device), len(ops)) for one in names])
    codes, index = _distinct(signature.astype("int64") * len(ops) + op[name])
    by_number = list(ops)
    return index, [
        _interned_args(*by_number[code % len(ops)], signatures[code // len(ops)])
        for code in codes.tolist()
    ]


@lru_cache(maxsize=16384)
def _interned_args(op: str, raw: str, device: str, signature: Signature) -> CollectiveArgs:
    input_sizes, input_dtypes, output_sizes, output_dtypes = signature
    return CollectiveArgs(
        op,
        raw,
        _specs(input_sizes, input_dtypes, device),
        _specs(output_sizes, output_dtypes, device),
    )


def _specs(
    sizes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...], device: str
) -> tuple[TensorSpec, ...]:
    sizes = tuple(shape[:_DIMENSIONS_MAX] for shape in sizes)
    names = [dtype_of(clean(dtype)) for dtype in dtypes] + [UNKNOWN_DTYPE] * (
        len(sizes) - len(dtypes)
    )
    return tuple(
        TensorSpec(shape, dtype, device or "unknown")
        for shape, dtype in zip(sizes, names, strict=False)
    )


def _peers(
    channel: Integers, name: Integers, names: list[ProfilingName], channels: list[Channel]
) -> Integers:
    """Return the peers' global ranks; the names of sends and receives hold group ranks."""
    if not len(name) or not any(one.peer is not None for one in names):
        return np.full(len(name), -1, "int32")
    codes, index = _distinct(channel.astype("int64") * len(names) + name)
    peers = []
    for code in codes.tolist():
        peer, ranks = names[code % len(names)].peer, channels[code // len(names)].group.ranks
        peers.append(ranks[peer] if peer is not None and peer < len(ranks) else -1)
    return np.array(peers, "int32")[index]


def _distinct(codes: Integers) -> tuple[Integers, Integers]:
    """Return the sorted distinct values and each entry's index into them: ``np.unique``, but faster
    for small values.
    """
    top = int(codes.max())
    if top >= 1 << 16:
        return np.unique(codes, return_inverse=True)
    there = np.zeros(top + 1, "bool")
    there[codes] = True
    return np.flatnonzero(there), (np.cumsum(there, dtype="int32") - 1)[codes]


class _Numbers(NamedTuple):
    """NCCL's two counters for each process group, as each entry shows them: the last collective and
    the last message or batch.
    """

    collective: Integers
    message: Integers


def _which(
    names: list[ProfilingName], name: Integers, holds: Callable[[ProfilingName], bool]
) -> Integers:
    """Return whether a property of its name holds for each entry."""
    table = np.array([holds(one) for one in names] or [False])
    return table[name] if len(name) else np.zeros(0, "bool")


def _closed_batches(
    channel: Integers, is_message: Integers, numbers: _Numbers, closes: Integers, *, lost: bool
) -> Integers:
    """Return which entries are messages or close a batch of messages.

    NCCL records the entry that closes a batch like a collective, with the number of the last
    collective, which it has nothing to do with (torch 2.7 to 2.15; before, with a number of its
    own). But a batch counts as one message, so the entry has the batch's number. Where its members
    are lost, an entry that may close a batch is taken for one: it tells nothing about the
    collective of its number.

    Args:
        channel: of each entry.
        is_message: whether the entry is a send or a receive.
        numbers: of each entry.
        closes: whether the entry closes a coalesced group.
        lost: whether entries before the first one are lost, or others are unreadable.
    """
    of_batch = is_message.copy()
    ends = np.flatnonzero(closes & ~is_message)
    if not len(ends):
        return of_batch
    order = np.argsort(channel, kind="stable")
    follows = channel[order[1:]] == channel[order[:-1]]
    previous = np.full(len(channel), -1)
    previous[order[1:][follows]] = order[:-1][follows]
    before = previous[ends]
    first = before < 0
    same_message = ~first & (numbers.message[before] == numbers.message[ends])
    same_collective = ~first & (numbers.collective[before] == numbers.collective[ends])
    closes_messages = is_message[before] & ~closes[before] & same_message
    of_batch[ends] = closes_messages | (same_collective & ~same_message) | (first & lost)
    return of_batch


def _coalesced(
    channel: Integers, is_p2p: Integers, sequence: Integers, closes: Integers
) -> Integers:
    """Number the coalesced groups: consecutive entries of a channel with one sequence number, up to
    the closing entry.
    """
    numbers = np.zeros(len(channel), "int32")
    if len(channel) < 2:
        return numbers
    stream = channel.astype("int64") * 2 + is_p2p
    order = np.argsort(stream.astype("int16") if stream.max() < 1 << 15 else stream, kind="stable")
    stream, sequence, closes = stream[order], sequence[order], closes[order]
    same = (
        (stream[1:] == stream[:-1])
        & (sequence[1:] == sequence[:-1])
        & (sequence[1:] >= 0)
        & ~closes[:-1]
    )
    if not same.any():
        return numbers
    runs = np.cumsum(np.concatenate(([True], ~same)))
    several = np.bincount(runs)[runs] > 1
    firsts = np.unique(runs[several])
    numbers[order[several]] = np.searchsorted(firsts, runs[several]) + 1
    return numbers


def _end_with_their_group(
    coalesced: Integers, closes: Integers, state: Integers, completed: Integers
) -> None:
    """Copy the state of each coalesced group's closing entry to its members, which stay "scheduled"
    forever.
    """
    ends = np.flatnonzero(closes & (coalesced > 0))
    if not len(ends):
        return
    end_of = np.full(int(coalesced.max()) + 1, -1)
    end_of[coalesced[ends]] = ends
    end = end_of[coalesced]
    members = np.flatnonzero((end >= 0) & ~closes & (state != COMPLETED))
    for column in (state, completed):
        column[members] = column[end[members]]


def _status(value: Any) -> dict[str, Status]:
    found: dict[str, Status] = {}
    if isinstance(value, dict):
        for key, status in value.items():
            if isinstance(key, str) and isinstance(status, dict):
                last = [
                    _number(status.get(f"last_{what}_collective"))
                    for what in ("enqueued", "started", "completed")
                ]
                found[clean(key)] = (last[0], last[1], last[2])
    return found


def _number(value: Any) -> int:
    """Return an integer, which is a string in JSON; -1 for anything else."""
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    return value if type(value) is int and -1 <= value <= _INTEGER_MAX else -1


def _status_groups(columns: RankColumns, pg_id: Integers, channel: Integers) -> dict[str, str]:
    """Map each status's process-local group id to the name of its group, using entries with that
    id.

    Ids and names are both assigned in the order of group creation. So if there are as many statuses
    as groups and no entry contradicts it, they correspond one by one, even in a dump without
    entries.
    """
    known: dict[str, str] = {}
    if len(pg_id) and pg_id.min() >= 0 and pg_id.max() < 1 << 16:
        codes, _ = _distinct(pg_id * len(columns.channels) + channel)
        for code in codes.tolist():
            known.setdefault(
                str(code // len(columns.channels)),
                columns.channels[code % len(columns.channels)].group.name,
            )
    names = [one.group.name for one in columns.groups]
    if len(columns.status) == len(names) and all(
        text.isdecimal() and len(text) < 20 for text in [*columns.status, *names]
    ):
        in_order = dict(zip(sorted(columns.status, key=int), sorted(names, key=int), strict=True))
        if all(in_order.get(key) == name for key, name in known.items()):
            return in_order
    return known


def _infer_rank(
    columns: RankColumns, channel: Integers, name: Integers, names: list[ProfilingName]
) -> None:
    """Infer the rank that wrote the dump: it is in every group and at one end of each
    point-to-point operation.
    """
    members: set[int] | None = None
    for group in [*columns.groups, *columns.channels]:
        if group.group.ranks:
            members = (
                set(group.group.ranks) if members is None else members & set(group.group.ranks)
            )
        if group.group.description == _DEFAULT_GROUP:
            columns.world_size = max(columns.world_size, len(group.group.ranks))
    used, first = np.unique(name, return_index=True)
    for index, at in zip(used.tolist(), first.tolist(), strict=True):
        one = names[index]
        if one.own_rank is not None:
            ranks = columns.channels[int(channel[at])].group.ranks
            if one.own_rank < len(ranks):
                members = {ranks[one.own_rank]} & (
                    members if members is not None else {ranks[one.own_rank]}
                )
    columns.possible_ranks = tuple(sorted(members or ()))
    if len(columns.possible_ranks) == 1:
        columns.rank = columns.possible_ranks[0]
