"""Interpret a Flight Recorder table: process groups, operations, states, coalesced groups, and the
rank that wrote it.

The table has the entries' raw values by column; everything here is computed for all entries at
once. An entry ``nccl:all_reduce`` of group ``("0", "default_pg")`` with state "scheduled" and
``retired: false``, for example, is an ``all_reduce`` on the channel (default group, cuda), in
flight.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeVar

import numpy as np

from commlens.formats.columns import COMPLETED, RETIRED, Integers, RankColumns, Status, stack_of
from commlens.formats.flight_recorder.names import (
    ProfilingName,
    dtype_of,
    has_too_many_ranks,
    parse_ranks,
    read_name,
)
from commlens.formats.flight_recorder.table import INTEGER_MAX, EntryColumns, Signature
from commlens.model.collective import Channel, CollectiveArgs, ProcessGroup, Stack, TensorSpec
from commlens.model.limits import WORLD_MAX
from commlens.model.ops import POINT_TO_POINT, UNKNOWN_DTYPE
from commlens.text import TEXT_MAX, clean

KNOWN_VERSIONS: Final = frozenset(f"2.{minor}" for minor in range(11))
_FIRST_TENSOR_ONLY: Final = frozenset(f"2.{minor}" for minor in range(4))
"""Versions in which the sizes of an all_to_all of lists are those of the first tensors, and cannot
be distinguished from those of whole tensors.
"""
_TORCHCOMMS: Final = frozenset({"nccl", "ncclx", "rccl", "rcclx", "gloo", "xccl", "mccl", "fake"})
_HOOKED: Final = re.compile(r"nccl\d+|nccl-lazy")
_DEFAULT_GROUP: Final = "default_pg"
_DIMENSIONS_MAX: Final = 64  # of a tensor in torch
_NO_TENSORS: Final[Signature] = ((), (), (), ())
_Made = TypeVar("_Made")


def columns_from_table(table: EntryColumns, source: str) -> RankColumns:
    """Return the table's entries as columns that can be compared across ranks."""
    columns, ranks = _read_about(table, source)
    # the distinct profiling names, and each entry's index into them
    texts, name_index = [clean(text) for text in table.names], table.column("name")
    names = [read_name(text) for text in texts]
    channel, columns.channels = _channels(table, names, ranks)
    args_index, columns.args = _args(table, names, one_tensor=columns.version in _FIRST_TENSOR_ONLY)
    columns.call_stacks = _stacks(table)
    closes = _which(names, name_index, lambda one: one.closes)
    named_message = _which(names, name_index, lambda one: one.op in POINT_TO_POINT)
    is_message = table.column("is_p2p") | named_message
    lost = columns.lost_entries or bool((table.column("record_id")[:1] > 0).any())
    of_messages = _belongs_to_messages(table, channel, is_message, closes, lost=lost)
    sequence = _sequence(table, channel, of_messages, lost=lost)
    if unnumbered := int((~of_messages & (sequence < 0)).sum()):
        columns.problems.append(
            f"{unnumbered} entries have no readable sequence number and are compared with no others"
        )
        columns.lost_entries = True
    coalesced = _coalesced(channel, of_messages, sequence, closes)
    state = _states(table, texts)
    by_hooks = _is_of_torchcomms(table) or _is_by_hooks(texts, state)
    if by_hooks:
        collectives = state[~is_message]
        columns.issued_only = len(collectives) > 0 and bool((collectives == RETIRED).all())
        columns.issued_messages = bool(is_message.any())
        state = _states_of_hooks(state, channel, is_message)
    shows_state = _entries_with_states(coalesced, closes, state)
    duration = table.column("duration_ms")
    columns.set_columns(
        {
            "channel": channel,
            "args_index": args_index,
            "stack": table.column("stack"),
            "sequence": sequence,
            "record_id": table.column("record_id"),
            "op_id": table.column("op_id"),
            "state": state[shows_state],
            "retired": table.column("retired"),
            "p2p": of_messages,
            "peer": _ranks_in(columns.channels, channel, name_index, [one.peer for one in names]),
            "created_ns": np.maximum(table.column("created_ns"), 0),
            "started_ns": np.maximum(table.column("started_ns"), 0),
            "completed_ns": np.maximum(table.column("completed_ns"), 0)[shows_state],
            "duration_ns": np.where(duration >= 0, duration * 1e6, -1.0),
            "timeout_ms": np.maximum(table.column("timeout_ms"), 0),
            "coalesced": coalesced,
            "closes": closes,
        }
    )
    if {one.backend for one in names} == {"gloo"}:
        columns.origin = "gloo-recorder"
    # hooks count all calls in their status, also messages and captured ones
    status = {} if by_hooks else _status(table.about.get("pg_status"))
    names_of_groups = _status_groups(columns, status, table.column("pg_id"), channel)
    columns.status = {name: status[key] for key, name in names_of_groups.items() if key in status}
    own_rank = _ranks_in(columns.channels, channel, name_index, [one.own_rank for one in names])
    _infer_rank(columns, own_rank)
    return columns


def _stacks(table: EntryColumns) -> list[Stack]:
    frames = [(clean(file), line, clean(function)) for file, line, function in table.frames]
    return [
        stack_of(frames[place] for place in memoryview(stack).cast("i")) for stack in table.stacks
    ]


def _read_about(table: EntryColumns, source: str) -> tuple[RankColumns, _Ranks]:
    """Return columns without entries, with the file's facts about itself and about its groups and
    their ranks.
    """
    version, groups = table.about.get("version"), table.about.get("pg_config")
    columns = RankColumns(source=source)
    columns.version = clean(version) if isinstance(version, str) and len(version) < 64 else ""
    columns.problems += _problems(table, columns.version)
    columns.lost_entries = table.truncated or table.malformed > 0 or table.unknown_states > 0
    ranks = _ranks_of_groups(groups if isinstance(groups, dict) else {}, columns.problems)
    columns.groups = [
        _channel(name, description, "", "", ranks)
        for name, by_description in ranks.items()
        for description in by_description
        if name
    ]
    return columns, ranks


def _problems(table: EntryColumns, version: str) -> list[str]:
    texts = itertools.chain(
        table.names, *table.groups, *((file, function) for file, _, function in table.frames)
    )
    longest = max(map(len, texts), default=0)
    known = version in KNOWN_VERSIONS or (not version and table.truncated)
    return [
        problem
        for applies, problem in (
            (
                table.truncated,
                "the file ends in the middle: it was cut off while it was written or copied, and"
                f" {len(table)} whole entries were read",
            ),
            (table.malformed, f"{table.malformed} entries are malformed and were skipped"),
            (
                table.unknown_states,
                f"{table.unknown_states} entries are in an unknown state and were skipped",
            ),
            (
                not known,
                f"the format version {version or '(none)'} is unknown; it was read like 2.10",
            ),
            (
                longest > TEXT_MAX,
                f"texts of up to {longest} characters were cut to {TEXT_MAX}",
            ),
        )
        if applies
    ]


# --- process groups and arguments

_Ranks = dict[str, dict[str, tuple[int, ...]]]
"""The global ranks of process groups by name and description."""


def _ranks_of_groups(groups: dict[Any, Any], problems: list[str]) -> _Ranks:
    """Return the ranks of the process groups. Native gloo has one group without a name. Add a
    problem if groups list more ranks than a job has.
    """
    found: _Ranks = {}
    longest = 0
    for name, about in groups.items():
        if isinstance(about, dict):
            ranks = about.get("ranks")
            ranks = ranks if isinstance(ranks, str) else ""
            if has_too_many_ranks(ranks):
                longest = max(longest, ranks.count(",") + 1)
            if isinstance(name, str):
                by_description = found.setdefault(clean(name), {})
                by_description[_description(about.get("desc"))] = parse_ranks(ranks)
    if longest:
        problems.append(
            f"a group lists {longest:,} ranks, more than any job has ({WORLD_MAX:,}): its ranks are"
            " left out"
        )
    return found


def _description(value: Any) -> str:
    """Return a group's description; torch writes "undefined" for none."""
    return clean(value) if isinstance(value, str) and value != "undefined" else ""


def _channel(name: str, description: str, backend: str, device: str, ranks: _Ranks) -> Channel:
    by_description = ranks.get(name, {})
    members = by_description.get(description)
    if members is None:  # one of the two places may lack the description
        same = [found for other, found in by_description.items() if not (other and description)]
        members = same[0] if len(same) == 1 else ()
    return _interned_channel(name, description, members, backend, device)


@lru_cache(maxsize=65536)
def _interned_channel(
    name: str, description: str, ranks: tuple[int, ...], backend: str, device: str
) -> Channel:
    return Channel(
        ProcessGroup(name=name, ranks=ranks, description=description, backend=backend), device
    )


def _channels(
    table: EntryColumns, names: list[ProfilingName], ranks: _Ranks
) -> tuple[Integers, list[Channel]]:
    """Return a channel per group and backend, and each entry's index into them."""

    def make(group: int, backend: str, device: str) -> Channel:
        group_name, description = table.groups[group]
        return _channel(clean(group_name), _description(description), backend, device, ranks)

    kinds = [(one.backend, one.device) for one in names]
    return _pairs(table.column("group"), table.column("name"), kinds, make)


def _args(
    table: EntryColumns, names: list[ProfilingName], *, one_tensor: bool
) -> tuple[Integers, list[CollectiveArgs]]:
    """Return the distinct arguments, and each entry's index into them. ``one_tensor``: the sizes of
    an all_to_all may be those of its first tensors.
    """

    def make(signature: int, op: str, raw: str, device: str) -> CollectiveArgs:
        is_unknown = one_tensor and op == "all_to_all"
        return _interned_args(op, raw, device, _NO_TENSORS if is_unknown else signatures[signature])

    signatures = table.signatures
    ops = [(one.op, one.raw, one.device) for one in names]
    return _pairs(table.column("signature"), table.column("name"), ops, make)


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
    names = [dtype_of(clean(dtype)) for dtype in dtypes] + [UNKNOWN_DTYPE] * (
        len(sizes) - len(dtypes)
    )
    return tuple(
        TensorSpec(shape[:_DIMENSIONS_MAX], dtype, device or "unknown")
        for shape, dtype in zip(sizes, names, strict=False)
    )


def _ranks_in(
    channels: list[Channel], channel: Integers, name_index: Integers, group_ranks: list[int | None]
) -> Integers:
    """Return for each entry the global rank of a group rank that its name holds; -1 if none."""

    def global_rank(index: int, group_rank: int | None) -> int:
        ranks = channels[index].group.ranks
        return ranks[group_rank] if group_rank is not None and group_rank < len(ranks) else -1

    index, ranks = _pairs(channel, name_index, [(one,) for one in group_ranks], global_rank)
    return np.array(ranks, "int32")[index]


def _pairs(
    column: Integers,
    name_index: Integers,
    of_names: list[tuple[Any, ...]],
    make: Callable[..., _Made],
) -> tuple[Integers, list[_Made]]:
    """Make one object for each distinct pair of a column's value and a property of the entry's
    name, and return each entry's index into these objects.

    If the column is ``[0, 0, 1]`` and all names have the property ``("nccl", "cuda")``, the objects
    are ``make(0, "nccl", "cuda")`` and ``make(1, "nccl", "cuda")``, and the index is ``[0, 0, 1]``.

    Args:
        column: of each entry.
        name_index: of each entry, the index of its name.
        of_names: of each name, its property.
        make: makes an object from a value of the column and a property.
    """
    distinct = list(dict.fromkeys(of_names))
    numbers = {value: number for number, value in enumerate(distinct)}
    number_of_name = np.array([numbers[value] for value in of_names], "int64")
    # a pair as one number, so that the distinct pairs are found at once
    count = len(distinct)
    codes, index = _distinct(column.astype("int64") * count + number_of_name[name_index])
    return index, [make(code // count, *distinct[code % count]) for code in codes.tolist()]


def _distinct(codes: Integers) -> tuple[Integers, Integers]:
    """Return the sorted distinct values and each entry's index into them: ``np.unique``, but faster
    for small values.
    """
    top = int(codes.max(initial=-1))
    if top >= 1 << 16:
        return np.unique(codes, return_inverse=True)
    there = np.zeros(top + 1, "bool")
    there[codes] = True
    return np.flatnonzero(there), (np.cumsum(there, dtype="int32") - 1)[codes]


def _which(
    names: list[ProfilingName], name_index: Integers, holds: Callable[[ProfilingName], bool]
) -> Integers:
    """Return whether a property of its name holds for each entry."""
    return np.array([holds(one) for one in names], "bool")[name_index]


# --- states


def _states(table: EntryColumns, texts: list[str]) -> Integers:
    """Return the entries' states. An entry that is retired has ended, unless it is NCCL's own
    recorder's, which retires an op that completed or timed out.
    """
    state = table.column("state")
    is_nccl = np.array([text.startswith("nccl:") for text in texts], "bool")[table.column("name")]
    is_open = state != COMPLETED
    if not _is_of_torchcomms(table):
        is_open &= ~is_nccl
    return np.where(is_open & table.column("retired"), RETIRED, state)


def _is_by_hooks(texts: list[str], state: Integers) -> bool:
    """Return whether hooks of torch 2.15 recorded the calls: those of NCCL's newer backends, or of
    one that tells no completion, whose entries are all retired when issued.
    """
    backends = {text.rpartition(":")[0] for text in texts} - {"nccl", "gloo", "xccl", ""}
    known = all(_HOOKED.fullmatch(backend) for backend in backends)
    return bool(backends) and (known or bool((state >= RETIRED).all()))


def _states_of_hooks(state: Integers, channel: Integers, is_message: Integers) -> Integers:
    """Return the states of calls that hooks recorded.

    The members of a batch complete for the hooks when they are issued. Collectives of whose channel
    a later one completed have ended: the backend rejected their call, and they stay "scheduled" for
    ever.
    """
    state = np.where(is_message & (state == COMPLETED), RETIRED, state)
    for code in np.unique(channel).tolist():
        rows = np.flatnonzero((channel == code) & ~is_message)
        done = np.flatnonzero(state[rows] == COMPLETED)
        before = rows[: done[-1]] if len(done) else rows[:0]
        state[before[state[before] < COMPLETED]] = COMPLETED
    return state


def _entries_with_states(coalesced: Integers, closes: Integers, state: Integers) -> Integers:
    """Return for each entry the entry that shows its state: the one that closes its coalesced
    group, whose members stay "scheduled" for ever, or itself.
    """
    closing = np.flatnonzero(closes & (coalesced > 0))
    of_group = np.full(int(coalesced.max(initial=0)) + 1, -1)
    of_group[coalesced[closing]] = closing
    of_entry = of_group[coalesced]
    is_open_member = (of_entry >= 0) & ~closes & (state != COMPLETED)
    return np.where(is_open_member, of_entry, np.arange(len(state)))


# --- sequence numbers


def _is_of_torchcomms(table: EntryColumns) -> bool:
    """Return whether torchcomms' recorder wrote the dump: it describes each group by its backend,
    and has no status.
    """
    backends = {description for _, description in table.groups}
    return bool(backends) and backends <= _TORCHCOMMS and not table.about.get("pg_status")


def _sequence(
    table: EntryColumns, channel: Integers, of_messages: Integers, *, lost: bool
) -> Integers:
    """Return the sequence numbers; -1 if there is none."""
    collectives, messages = table.column("collective_seq_id"), table.column("p2p_seq_id")
    if not _is_of_torchcomms(table):
        return np.where(of_messages & (messages >= 0), messages, collectives)
    # Torchcomms has one counter for the calls on all communicators, messages included. If no entry
    # is lost, the collectives of each communicator are counted anew, from 1.
    numbers = np.full(len(table), -1)
    is_complete = not lost and bool((collectives == np.arange(len(table))).all())
    for code in np.unique(channel).tolist() if is_complete else ():
        rows = np.flatnonzero((channel == code) & ~of_messages)
        numbers[rows] = np.arange(1, len(rows) + 1)
    return numbers


def _belongs_to_messages(
    table: EntryColumns, channel: Integers, is_message: Integers, closes: Integers, *, lost: bool
) -> Integers:
    """Return which entries are sends or receives, or close a batch of them.

    NCCL has two counters for a process group: one of collectives, and one of messages, in which a
    batch counts as one. Each entry shows both. The entry that closes a batch looks like one that
    closes coalesced collectives: it has the number of the last collective, which it has nothing to
    do with (torch 2.7 to 2.15; before, the batch raised that counter, too). The entry before it on
    its channel shows what it closes.

    Args:
        table: of the entries.
        channel: of each entry.
        is_message: whether the entry is a send or a receive.
        closes: whether the entry closes a batch or coalesced collectives.
        lost: whether entries before the first one are lost, or others are unreadable.
    """
    collectives, messages = table.column("collective_seq_id"), table.column("p2p_seq_id")
    # of each entry, the entry before it on its channel; of the first one, the entry itself
    previous = np.arange(len(table))
    order = np.argsort(channel, kind="stable")
    earlier, later = order[:-1], order[1:]
    on_same = channel[earlier] == channel[later]
    previous[later[on_same]] = earlier[on_same]
    is_first = previous == np.arange(len(table))
    same_collective = collectives == collectives[previous]
    same_message = messages == messages[previous]
    after_member = (is_message & ~closes)[previous] & same_message
    # If a message was counted since the entry before it, and no collective, it closes a batch whose
    # members are lost. So may the first entry of a channel: if it is taken for such an entry, it
    # says nothing about the collective of its number.
    after_lost_member = (same_collective & ~same_message) | (is_first & lost)
    of_messages: Integers = is_message | (closes & (after_member | after_lost_member))
    return of_messages


def _coalesced(
    channel: Integers, of_messages: Integers, sequence: Integers, closes: Integers
) -> Integers:
    """Number the coalesced groups: consecutive entries of a channel with one sequence number, up to
    the closing entry.
    """
    numbers = np.zeros(len(channel), "int32")
    if len(channel) < 2:
        return numbers
    stream = channel.astype("int64") * 2 + of_messages
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


# --- what the file tells besides its entries


def _status(value: Any) -> dict[str, Status]:
    found: dict[str, Status] = {}
    for key, status in value.items() if isinstance(value, dict) else ():
        if isinstance(key, str) and isinstance(status, dict):
            enqueued, started, completed = (
                _number(status.get(f"last_{what}_collective"))
                for what in ("enqueued", "started", "completed")
            )
            found[clean(key)] = (enqueued, started, completed)
    return found


def _number(value: Any) -> int:
    """Return an integer, which is a string in JSON; -1 for anything else."""
    if isinstance(value, str) and len(value) < 20 and value.removeprefix("-").isdecimal():
        value = int(value)
    return value if type(value) is int and -1 <= value <= INTEGER_MAX else -1


def _status_groups(
    columns: RankColumns, status: Mapping[str, Status], pg_id: Integers, channel: Integers
) -> dict[str, str]:
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
    if len(status) == len(names) and all(
        text.isdecimal() and len(text) < 20 for text in [*status, *names]
    ):
        in_order = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True))
        if all(in_order.get(key) == name for key, name in known.items()):
            return in_order
    return known


def _infer_rank(columns: RankColumns, own: Integers) -> None:
    """Infer the rank that wrote the dump: it is in every group and at one end of each
    point-to-point operation; ``own`` is -1 for other entries.
    """
    groups = [one.group for one in [*columns.groups, *columns.channels]]
    default = [len(one.ranks) for one in groups if one.description == _DEFAULT_GROUP]
    columns.world_size = max(default, default=0)
    sets = [set(one.ranks) for one in groups if one.ranks]
    sets += [{rank} for rank in np.unique(own[own >= 0]).tolist()]
    columns.possible_ranks = tuple(sorted(set.intersection(*sets))) if sets else ()
    if len(columns.possible_ranks) == 1:
        columns.rank = columns.possible_ranks[0]
