"""Write dumps in the format of PyTorch's Flight Recorder, version 2.10: a pickle that torchfrtrace
reads, or JSON.

The format cannot represent reduce ops, roots, splits and tags, so these are left out. Operations
have the names of NCCL's process group, because torchfrtrace accepts no others. Unlike torch's JSON,
ours contains the stack frames.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from commlens.formats.columns import COMPLETED, RETIRED, STARTED, STATES, RankColumns
from commlens.formats.flight_recorder.names import DTYPES
from commlens.model.collective import Channel, CollectiveArgs, TensorSpec
from commlens.model.ops import BARRIERS, IN_PLACE, NCCL_NAMES, POINT_TO_POINT
from commlens.text import count

VERSION: Final = "2.10"

_BACKENDS: Final = frozenset({"nccl", "ncclx", "xccl", "gloo", "rccl", "rcclx", "mccl", "hccl"})
"""The backends that torchfrtrace accepts."""
_DTYPES: Final = {name: of_torch for of_torch, name in DTYPES.items()}
_REACHED: Final = (
    "last_enqueued_collective",
    "last_started_collective",
    "last_completed_collective",
)
_MESSAGES_FROM: Final = 1_000_000
"""The first number of messages. torchfrtrace takes a collective and a message with equal numbers
for a coalesced group, and fails.
"""


def to_pickle(rows: RankColumns, problems: list[str]) -> bytes:
    """Return one rank's dump as a pickle of protocol 2. ``problems`` receives a sentence on what
    the format cannot represent.
    """
    return pickle.dumps(_dump(rows, problems), protocol=2)


def to_json(rows: RankColumns, problems: list[str]) -> bytes:
    """Return one rank's dump as JSON."""
    dump = _dump(rows, problems)
    dump["pg_status"] = {
        key: {name: str(value) for name, value in about.items()}
        for key, about in dump["pg_status"].items()
    }
    for entry in dump["entries"]:
        for name in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[name] = entry[name] or 0
    return msgspec.json.encode(dump)


def _dump(rows: RankColumns, problems: list[str]) -> dict[str, Any]:
    entries = list(_entries(rows))
    unnamed = len(rows) - len(entries)
    if unnamed:
        problems.append(
            f"rank {rows.rank}: {count(unnamed, 'message')} to or from an unknown rank"
            f" {'was' if unnamed == 1 else 'were'} left out: the format cannot represent them."
        )
    return {
        "version": VERSION,
        "pg_config": {
            channel.group.name: _config(channel) for channel in [*rows.groups, *rows.channels]
        },
        "comm_lib_version": "",
        "pg_status": _status(entries),
        "entries": entries,
    }


def _entries(rows: RankColumns) -> Iterator[dict[str, Any]]:
    """Yield the entries, without those that the format has no name for."""
    pg_ids: dict[str, int] = {}
    heads = [
        {
            "pg_id": pg_ids.setdefault(channel.group.name, len(pg_ids)),
            "process_group": (channel.group.name, channel.group.description or "undefined"),
        }
        for channel in rows.channels
    ]
    backends = [_backend(channel) for channel in rows.channels]
    sizes = [_sizes(args) for args in rows.args]
    frames = [
        [{"name": frame.function, "filename": frame.file, "line": frame.line} for frame in stack]
        for stack in rows.call_stacks
    ]
    numbers = _SequenceNumbers(rows)
    for at in range(len(rows)):
        channel, args = int(rows.channel[at]), int(rows.args_index[at])
        collective, message = numbers.at(at)
        name = _name(rows.args[args], rows.channels[channel], rows.rank, int(rows.peer[at]))
        if name is None:
            continue
        stack = int(rows.stack[at])
        entry = {
            "frames": frames[stack] if stack >= 0 else [],
            "record_id": int(rows.record_id[at]),
            **heads[channel],
            "collective_seq_id": collective,
            "p2p_seq_id": message,
            "op_id": int(rows.op_id[at]),
            "profiling_name": f"{backends[channel]}:{name}",
            "time_created_ns": int(rows.created_ns[at]),
            **sizes[args],
            **_progress(rows, at),
            "retired": bool(rows.retired[at]),
            "timeout_ms": int(rows.timeout_ms[at]),
            "is_p2p": bool(rows.p2p[at]),
            "thread_id": "0",
            "thread_name": "",
        }
        if rows.duration_ns[at] >= 0:
            entry["duration_ms"] = int(rows.duration_ns[at]) / 1e6
        yield entry


def _progress(rows: RankColumns, at: int) -> dict[str, Any]:
    """Return an entry's state, and when it was seen to have started and completed."""
    state = int(rows.state[at])
    started = int(rows.started_ns[at]) if state in (STARTED, COMPLETED) else 0
    completed = int(rows.completed_ns[at]) if state == COMPLETED else 0
    return {
        "state": STATES[state] if state != RETIRED else "scheduled",
        "time_discovered_started_ns": started or None,
        "time_discovered_completed_ns": completed or None,
    }


def _status(entries: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the numbers of the last collectives of each group, in the order of the groups."""
    status: dict[int, dict[str, int]] = {}
    for entry in entries:
        if entry["is_p2p"] or entry["collective_seq_id"] < 0:
            continue
        last = status.setdefault(entry["pg_id"], dict.fromkeys(_REACHED, -1))
        state = entry["state"]
        has_started = state == "started" or entry["time_discovered_started_ns"]
        has_completed = entry["retired"] or state == "completed"
        for field, reached in zip(_REACHED, (True, has_started, has_completed), strict=True):
            if reached:
                last[field] = max(last[field], entry["collective_seq_id"])
    return {str(pg_id): status[pg_id] for pg_id in sorted(status)}


class _SequenceNumbers:
    """The sequence numbers of each channel as torch's recorder counts them."""

    def __init__(self, rows: RankColumns) -> None:
        self._rows = rows
        self._closing = {
            int(batch): at for at, batch in enumerate(rows.coalesced) if batch and rows.closes[at]
        }
        self._collectives: dict[int, int] = {}
        # the last number, and the batch that it is of
        self._messages: dict[int, tuple[int, int]] = {}

    def at(self, at: int) -> tuple[int, int]:
        """Return the numbers of the last collective and the last message, after one more row."""
        rows = self._rows
        channel, batch, sequence = (
            int(rows.channel[at]),
            int(rows.coalesced[at]),
            int(rows.sequence[at]),
        )
        ours = rows.origin == "commlens"
        message, before = self._messages.get(channel, (_MESSAGES_FROM if ours else 0, -1))
        if rows.p2p[at]:
            message = message + (not batch or batch != before) if ours else sequence
            self._messages[channel] = (message, batch)
        else:  # the members of a coalesced group share the number of the entry that closes it
            self._collectives[channel] = (
                int(rows.sequence[self._closing.get(batch, at)]) if batch else sequence
            )
        return self._collectives.get(channel, 0), message


def _config(channel: Channel) -> dict[str, str]:
    group = channel.group
    return {
        "name": group.name,
        "desc": group.description or "undefined",
        "ranks": str(list(group.ranks)),
    }


def _backend(channel: Channel) -> str:
    backend = channel.group.backend
    return backend if backend in _BACKENDS else "nccl" if channel.device == "cuda" else "gloo"


def _name(asked: CollectiveArgs, channel: Channel, rank: int, peer: int) -> str | None:
    """``all_reduce``, ``send 0->1`` with ranks of the group; None if the format has no name for
    it.
    """
    if asked.op not in POINT_TO_POINT:
        return NCCL_NAMES.get(asked.dispatcher_op, asked.dispatcher_op)
    ranks = channel.group.ranks
    if peer not in ranks or rank not in ranks:
        return None
    me, other = ranks.index(rank), ranks.index(peer)
    return f"send {me}->{other}" if asked.op == "send" else f"recv {me}<-{other}"


def _sizes(asked: CollectiveArgs) -> dict[str, list[Any]]:
    """Return sizes and dtypes of inputs and outputs. A list of one tensor per rank is one tensor,
    since NCCL's group flattens it.
    """
    inputs, outputs = asked.inputs, asked.outputs
    if asked.op in BARRIERS:
        inputs = outputs = ()  # torchfrtrace fails if only one of them is empty
    if asked.op in IN_PLACE:
        inputs = outputs = inputs or outputs
    if asked.dispatcher_op == "allgather_":
        outputs = _flat(outputs)
    if asked.dispatcher_op == "reduce_scatter_":
        inputs = _flat(inputs)
    return {
        "input_sizes": [list(one.shape) for one in inputs],
        "input_dtypes": [_DTYPES.get(one.dtype, one.dtype) for one in inputs],
        "output_sizes": [list(one.shape) for one in outputs],
        "output_dtypes": [_DTYPES.get(one.dtype, one.dtype) for one in outputs],
    }


def _flat(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    if len(tensors) < 2 or len(set(tensors)) > 1:
        return tuple(tensors)
    return (TensorSpec((len(tensors), *tensors[0].shape), tensors[0].dtype, tensors[0].device),)
