"""Real runs over gloo, recorded by commlens, as the files that the Flight Recorder would have left
had they run over NCCL.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from more_scenarios import find

from commlens.model.collective import Collective, ProcessGroup, State
from commlens.model.ranklog import RankLog
from dumpgen.faults import Truth
from dumpgen.pickler import Numbers, Record, header, template

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "_all_gather_base",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "all_reduce_barrier",
}
"""The dispatcher's names to those that torch's NCCL backend records."""

DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}


def write(
    logs: Sequence[RankLog],
    folder: Path,
    *,
    timing: bool,
    without: Collection[int] = (),
    prefix: str = "rank_",
) -> None:
    """One file of each rank.

    Args:
        logs: what commlens recorded.
        folder: for the files.
        timing: as with TORCH_NCCL_ENABLE_TIMING.
        without: ranks that leave no dump, since their processes died.
        prefix: of the names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for log in logs:
        if log.rank not in without:
            (folder / f"{prefix}{log.rank}").write_bytes(pickled(log, timing=timing))


def pickled(log: RankLog, *, timing: bool, version: str = "2.10") -> bytes:
    """The dump of one rank."""
    groups = list(_groups(log))
    ids = {group.name: number for number, group in enumerate(groups)}
    status: dict[str, list[int]] = {}
    entries: list[tuple[Record, Numbers]] = []
    times: list[tuple[int, int, int]] = []
    counts: dict[str, list[int]] = {}
    batch: tuple[int, str] | None = None

    def add(op: Collective, name: str, state: str, *, closing: bool = False) -> None:
        group, p2p = op.channel.group, op.is_point_to_point
        done, count = state == "completed", counts[group.name]
        began = timing and state != "scheduled"
        entries.append(
            (
                Record(
                    frames=tuple((frame.function, frame.file, frame.line) for frame in op.stack),
                    pg_id=ids[group.name],
                    group=(group.name, group.description),
                    name=f"nccl:{name}",
                    inputs=() if closing else tuple(spec.shape for spec in op.args.inputs),
                    outputs=(
                        ()
                        if closing
                        else tuple(spec.shape for spec in op.args.outputs or op.args.inputs)
                    ),
                    dtype=_dtype(op),
                    state=state,
                    timed_start=began,
                    timed_end=done,
                    retired=done,
                    is_p2p=p2p,
                    duration_ms=(
                        max(0, op.done_ns - op.entered_ns) / 1e6 if timing and done else None
                    ),
                    thread=0,
                ),
                (len(entries), count[0], count[1], count[2]),
            )
        )
        times.append((op.announced_ns, op.entered_ns or op.announced_ns, _ended_ns(op)))

    heads: set[str] = set()
    for op in log.collectives:
        if op.state is State.ANNOUNCED:
            continue
        group = op.channel.group
        count = counts.setdefault(group.name, [0, 0, 0])
        open_batch = (op.coalescing_id, group.name) if op.coalescing_id else None
        if open_batch is None or open_batch != batch:
            count[1 if op.is_point_to_point else 0] += 1
        batch = open_batch
        count[2] += 1
        completed = op.state is State.COMPLETED or (
            op.state is State.UNKNOWN and _followed(log, op)
        )
        state = (
            "completed"
            if completed
            else "started"
            if timing and group.name not in heads
            else "scheduled"
        )
        if op.coalesced_members:
            batch = None
            add(op, "coalesced", state, closing=True)
        else:
            add(op, _name(op, log.rank), "scheduled" if open_batch else state)
        if not completed:
            heads.add(group.name)
        values = status.setdefault(str(ids[group.name]), [-1, -1, -1])
        values[0] = count[1 if op.is_point_to_point else 0]
        if completed:
            values[2] = values[0]
    head = header(
        version,
        [(group.name, group.description, str(list(group.ranks))) for group in groups],
        [(key, (v[0], v[1], v[2])) for key, v in status.items()],
    )
    whole = template(version, head, entries, opens=True, closes=True)
    created, started, completed = np.array(times, dtype=np.int64).reshape(-1, 3).T
    return whole.fill(created, started, completed).tobytes()


def _groups(log: RankLog) -> Iterator[ProcessGroup]:
    """The default group first, then those that were used."""
    seen = {op.channel.group.name: op.channel.group for op in log.collectives}
    default = next((group for group in seen.values() if group.description == "default_pg"), None)
    yield default or ProcessGroup("0", tuple(range(log.world_size)), "default_pg")
    yield from (group for group in seen.values() if group is not default)


def _name(op: Collective, rank: int) -> str:
    ranks = op.channel.group.ranks
    if not op.is_point_to_point:
        return NAMES.get(op.args.dispatcher_op, op.args.op)
    if op.peer is None:
        return "recvAnySource"
    me, peer = ranks.index(rank), ranks.index(op.peer)
    return f"send {me}->{peer}" if op.op == "send" else f"recv {me}<-{peer}"


def _dtype(op: Collective) -> str:
    specs = op.args.inputs or op.args.outputs
    return DTYPES.get(specs[0].dtype, specs[0].dtype) if specs else "Float"


def _ended_ns(op: Collective) -> int:
    return op.done_ns or op.wait_ended_ns or op.returned_ns or op.announced_ns


def _followed(log: RankLog, op: Collective) -> bool:
    """Whether something later in the same group completed."""
    return any(
        o.index > op.index and o.channel == op.channel and o.state is State.COMPLETED
        for o in log.collectives
    )


def truth_in_dumps(name: str, world_size: int) -> Truth:
    """The verdict that a scenario's dumps must get: they hold less than a black box does.

    The Flight Recorder does not write down reduce ops and roots: with another reduce op nothing
    hangs and nothing shows; with another root everybody is seen inside one broadcast. How a process
    ended is not in them either: it left no dump.
    """
    scenario = find(name)
    truth = scenario.truth(world_size)
    if name == "mismatch-reduce-op":
        return Truth(("healthy",))
    if name == "mismatch-root":
        return Truth(("stuck-inside", "missing", "mismatch/root"), (), also=(truth.culprits,))
    kinds = {*truth.kinds, *(("missing",) if "dead" in truth.kinds else ())}
    return Truth(tuple(sorted(kinds)), truth.culprits)


def without_dump(name: str, world_size: int) -> tuple[int, ...]:
    """The ranks whose processes died of the fault."""
    truth = find(name).truth(world_size)
    return truth.culprits if truth.kinds == ("dead",) else ()
