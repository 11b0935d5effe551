"""Dumps as PyTorch's Flight Recorder writes them, format 2.10: a pickle that torchfrtrace reads, or JSON.

What the format has no word for is left out: reduce op, root, splits, tags. Names of operations are those that NCCL's process group
gives, because torchfrtrace accepts no others. JSON has the frames of stacks, too, which torch leaves out of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from commlens.formats.columns import COMPLETED, RETIRED, STARTED, RankColumns
from commlens.model.collective import Channel, CollectiveArgs, TensorSpec
from commlens.model.ops import IN_PLACE, NCCL_NAMES, POINT_TO_POINT
from commlens.text import ranks_phrase

VERSION: Final = "2.10"

_BACKENDS: Final = frozenset({"nccl", "ncclx", "xccl", "gloo", "rccl", "rcclx", "mccl", "hccl"})
"""Those that torchfrtrace knows."""
_DTYPES: Final = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half", "float32": "Float",
    "float64": "Double", "complex32": "ComplexHalf", "complex64": "ComplexFloat", "complex128": "ComplexDouble", "bool": "Bool",
    "bfloat16": "BFloat16", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64",
}  # fmt: skip
_MESSAGES_FROM: Final = 1_000_000
"""Where numbers of messages begin: torchfrtrace takes a collective and a message of one number for a coalesced group, and fails."""
_STATES: Final = {STARTED: "started", COMPLETED: "completed", RETIRED: "scheduled"}


def to_pickle(rows: RankColumns, problems: list[str]) -> bytes:
    """One rank's dump as a pickle, protocol 2.

    Args:
        rows: the rank's operations.
        problems: takes a sentence about what the format could not take.
    """
    return pickle.dumps(_dump(rows, problems), protocol=2)


def to_json(rows: RankColumns, problems: list[str]) -> bytes:
    """One rank's dump as JSON."""
    dump = _dump(rows, problems)
    dump["pg_status"] = {key: {name: str(value) for name, value in about.items()} for key, about in dump["pg_status"].items()}
    for entry in dump["entries"]:
        for name in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[name] = entry[name] or 0
    return msgspec.json.encode(dump)


def _dump(rows: RankColumns, problems: list[str]) -> dict[str, Any]:
    names = [_backend(channel) for channel in rows.channels]
    pg_ids = {name: number for number, name in enumerate(dict.fromkeys(channel.group.name for channel in rows.channels))}
    entries: list[dict[str, Any]] = []
    frames: dict[int, list[dict[str, Any]]] = {}
    sizes = [_sizes(asked) for asked in rows.args]
    closing = {(int(number)): int(at) for at, number in enumerate(rows.coalesced) if number and rows.closes[at]}
    last: dict[int, int] = {}  # collectives on each channel so far
    messages: dict[int, tuple[int, int]] = {}  # of each channel, messages so far, and the batch that the last one is of
    status: dict[int, list[int]] = {}
    unnamed = 0
    for at in range(len(rows)):
        number, p2p, batch = int(rows.channel[at]), bool(rows.p2p[at]), int(rows.coalesced[at])
        channel, asked = rows.channels[number], rows.args[int(rows.args_index[at])]
        sequence = int(rows.sequence[at])
        count, before = messages.get(number, (_MESSAGES_FROM if rows.origin == "commlens" else 0, -1))
        if p2p:
            count = sequence if rows.origin != "commlens" else count + (not batch or batch != before)
            messages[number] = (count, batch)
        else:
            sequence = int(rows.sequence[closing.get(batch, at)]) if batch else sequence
            last[number] = sequence
        name = _name(asked, channel, rows.rank, int(rows.peer[at]))
        if name is None:
            unnamed += 1
            continue
        state = int(rows.state[at])
        inputs, outputs = sizes[int(rows.args_index[at])]
        stack = int(rows.stack[at])
        if stack >= 0 and stack not in frames:
            frames[stack] = [{"name": frame.function, "filename": frame.file, "line": frame.line} for frame in rows.stacks[stack]]
        entry = {
            "frames": frames.get(stack, []),
            "record_id": int(rows.record_id[at]),
            "pg_id": pg_ids[channel.group.name],
            "process_group": (channel.group.name, channel.group.description or "undefined"),
            "collective_seq_id": last.get(number, 0),
            "p2p_seq_id": count,
            "op_id": int(rows.op_id[at]),
            "profiling_name": f"{names[number]}:{name}",
            "time_created_ns": int(rows.created_ns[at]),
            "input_sizes": inputs[0],
            "input_dtypes": inputs[1],
            "output_sizes": outputs[0],
            "output_dtypes": outputs[1],
            "state": _STATES.get(state, "scheduled"),
            "time_discovered_started_ns": int(rows.started_ns[at]) or None if state in (STARTED, COMPLETED) else None,
            "time_discovered_completed_ns": int(rows.completed_ns[at]) or None if state == COMPLETED else None,
            "retired": bool(rows.retired[at]),
            "timeout_ms": int(rows.timeout_ms[at]),
            "is_p2p": p2p,
            "thread_id": "0",
            "thread_name": "",
        }
        if rows.duration_ns[at] >= 0:
            entry["duration_ms"] = int(rows.duration_ns[at]) / 1e6
        entries.append(entry)
        if not p2p:
            known = status.setdefault(pg_ids[channel.group.name], [-1, -1, -1])
            known[0] = max(known[0], sequence)
            if state == STARTED or (state == COMPLETED and rows.started_ns[at]):
                known[1] = max(known[1], sequence)
            if rows.retired[at] or state == COMPLETED:
                known[2] = max(known[2], sequence)
    if unnamed:
        problems.append(f"{ranks_phrase([rows.rank])}: {unnamed} receives from any source were left out: the format cannot say them.")
    return {
        "version": VERSION,
        "pg_config": {channel.group.name: _config(channel) for channel in [*rows.groups, *rows.channels]},
        "comm_lib_version": "",
        "pg_status": {
            str(key): dict(zip(("last_enqueued_collective", "last_started_collective", "last_completed_collective"), last3, strict=True))
            for key, last3 in status.items()
        },
        "entries": entries,
    }


def _config(channel: Channel) -> dict[str, str]:
    group = channel.group
    return {"name": group.name, "desc": group.description or "undefined", "ranks": str(list(group.ranks))}


def _backend(channel: Channel) -> str:
    backend = channel.group.backend
    return backend if backend in _BACKENDS else "nccl" if channel.device == "cuda" else "gloo"


def _name(asked: CollectiveArgs, channel: Channel, rank: int, peer: int) -> str | None:
    """``all_reduce``, ``send 0->1`` with ranks of the group; None where the format has no name for it."""
    if asked.op not in POINT_TO_POINT:
        return NCCL_NAMES.get(asked.dispatcher_op, asked.dispatcher_op)
    ranks = channel.group.ranks
    if peer not in ranks or rank not in ranks:
        return None
    me, other = ranks.index(rank), ranks.index(peer)
    return f"send {me}->{other}" if asked.op == "send" else f"recv {me}<-{other}"


Sizes = tuple[list[list[int]], list[str]]


def _sizes(asked: CollectiveArgs) -> tuple[Sizes, Sizes]:
    """Sizes and dtypes of inputs and outputs. A list of one tensor for each rank counts as one tensor, as NCCL's group flattens it."""
    inputs, outputs = asked.inputs, asked.outputs
    if asked.op in IN_PLACE:
        inputs = outputs = inputs or outputs
    if asked.dispatcher_op == "allgather_":
        outputs = _flat(outputs)
    if asked.dispatcher_op == "reduce_scatter_":
        inputs = _flat(inputs)
    return _pair(inputs), _pair(outputs)


def _flat(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    if len(tensors) < 2 or len(set(tensors)) > 1:
        return tuple(tensors)
    return (TensorSpec((len(tensors), *tensors[0].shape), tensors[0].dtype, tensors[0].device),)


def _pair(tensors: Sequence[TensorSpec]) -> Sizes:
    return [list(one.shape) for one in tensors], [_DTYPES.get(one.dtype, one.dtype) for one in tensors]
