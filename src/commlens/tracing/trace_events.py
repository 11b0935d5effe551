"""Conversion of raw events to the events and groups of a trace."""

from __future__ import annotations

import bisect
import contextlib
import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from commlens.model.collective import ProcessGroup
from commlens.model.ops import BARRIERS, IN_PLACE, POINT_TO_POINT
from commlens.model.trace import TraceEvent
from commlens.model.wire_bytes import wire_bytes
from commlens.tap import recorder_dumps
from commlens.tap.groups import Groups, LiveGroup, named_dims
from commlens.tap.interned_args import reduce_op_name
from commlens.tracing.attribution.op_names import counted_packet
from commlens.tracing.raw_event import RawEvent


class TraceEvents:
    """Converts the events of one trace and collects their groups."""

    def __init__(self, started_ns: int) -> None:
        self.groups: list[ProcessGroup] = []
        self.on_accelerator = False  # whether any group is
        self._started_ns = started_ns
        self._indices: dict[tuple[LiveGroup, str], int] = {}

    def convert(self, raw: RawEvent) -> TraceEvent:
        """Return the trace's event for a raw one."""
        args, info = raw.args, raw.info
        content = args.content
        group = args.channel.group
        inputs, outputs = content["in"], content["out"]
        input_bytes, output_bytes = _sizes(args.op, inputs, outputs)
        first = (inputs or outputs or [None])[0] if args.op not in BARRIERS else None
        return TraceEvent(
            sequence=raw.sequence,
            op=args.op,
            api=_api(raw),
            phase=raw.phase,
            group=self._group_index(group, args.channel.device),
            site=raw.path,
            call=raw.call.number if raw.call is not None else 0,
            microbatch=raw.microbatch,
            owner=raw.owner,
            cause=raw.cause,
            source=info.source,
            through=info.through,
            dtype=first[1] if first else "",
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            wire_bytes=wire_bytes(args.op, group.size, input_bytes, output_bytes),
            reduce_op=reduce_op_text(raw.reduce_op),
            root=content["root"],
            peer=args.peer if args.op in POINT_TO_POINT and args.peer >= 0 else None,
            tag=args.tag,
            asynchronous=content["async"],
            members=len(inputs) if "coalesced" in content["dop"] and len(inputs) > 1 else 0,
            thread=raw.thread,
            step=raw.step,
            started_ns=self._since_start(raw.started_ns),
            returned_ns=self._since_start(raw.returned_ns),
            wait_began_ns=self._since_start(raw.wait_began_ns),
            wait_ended_ns=self._since_start(raw.wait_ended_ns),
        )

    def add(self, group: LiveGroup) -> None:
        """Add a group on which nothing was issued, so that its name is known."""
        if all(group is not other for other, _ in self._indices):
            self._group_index(group, "cpu")

    def _since_start(self, moment: int) -> int:
        return max(1, moment - self._started_ns) if moment else 0

    def _group_index(self, group: LiveGroup, device: str) -> int:
        index = self._indices.get((group, device))
        if index is None:
            index = self._indices[group, device] = len(self.groups)
            self.on_accelerator = self.on_accelerator or device not in ("cpu", "meta")
            self.groups.append(
                ProcessGroup(
                    group.name,
                    group.members,
                    group.description,
                    group.backend(device),
                    group.mesh_dim,
                    group.incarnation,
                )
            )
        return index


def reduce_op_text(reduce_op: Any) -> str | None:
    """Return a reduce op's name; a name or None is returned as it is."""
    return (
        reduce_op if reduce_op is None or isinstance(reduce_op, str) else reduce_op_name(reduce_op)
    )


def _api(raw: RawEvent) -> str:
    if raw.functional is not None:
        name = str(raw.functional).replace("::", ".")
    elif raw.info.packet is not None:
        name = str(counted_packet(raw)).replace("::", ".")
    else:
        return f"c10d.{raw.dispatcher_op}"
    return name.removeprefix("_") if name.startswith("_c10d_functional.") else name


def _sizes(op: str, inputs: list[Any], outputs: list[Any]) -> tuple[int, int]:
    """Return the input and output bytes of a call; a barrier's tensor is no data."""
    if op in BARRIERS:
        return 0, 0
    if op in IN_PLACE:
        size = _bytes(inputs or outputs)
        return (0 if op == "recv" else size), (0 if op == "send" else size)
    return _bytes(inputs), _bytes(outputs)


def _bytes(tensors: list[Any]) -> int:
    total = 0
    for shape, dtype, *_ in tensors:
        kind = getattr(torch, dtype, None)
        size = int(kind.itemsize) if isinstance(kind, torch.dtype) else 1
        for extent in shape:
            size *= int(extent)
        total += size
    return total


def without_repeated(setup_until: int | None, events: Sequence[TraceEvent]) -> int | None:
    """Return the last collective of the setup without those that later steps issue again, such as a
    batch's broadcast: these belong to the first step.
    """

    def call_site(event: TraceEvent) -> tuple[Any, ...]:
        return event.op, event.group, event.source, event.through

    if not setup_until:
        return setup_until
    repeated = {call_site(event) for event in events if (event.last_step or event.step) > 0}
    setup = [event for event in events if event.sequence <= setup_until]
    return max((e.sequence for e in setup if call_site(e) not in repeated), default=0)


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and world size; 0 and 1 without a process group."""
    import torch.distributed as dist

    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else (0, 1)
    )


# --- the names of mesh dimensions


def name_mesh_dims(groups: Groups) -> None:
    """Name the mesh dimension of each group that lacks one, such as the default group under a
    dimension that spans the world.
    """
    nameless = {name for name, group in groups.by_name.items() if group.mesh_dim is None}
    if not nameless:
        return
    for mesh in (thing for thing in gc.get_objects() if type(thing) is DeviceMesh):
        with contextlib.suppress(Exception):
            for group_name, dim in named_dims(mesh):
                if group_name in nameless and _uses(mesh, groups.by_name[group_name]):
                    # if meshes cannot be distinguished, the newest wins
                    nameless.discard(group_name)
                    groups.name_mesh_dim(group_name, dim)


def _uses(mesh: Any, group: LiveGroup) -> bool:
    """Check that a mesh uses this very group, not an earlier one of the same name."""
    registry = getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {})
    registered = registry.get(group.name)
    return registered is None or registered is group.ref()


# --- durations
#
# Torch's Flight Recorder measures them on an accelerator under TORCH_NCCL_ENABLE_TIMING=1. Its
# entries hold no sequence number of ours. An entry was created while our collective was being
# issued, so their moments tell which belong together. Tried on torch 2.13.0 with gloo, whose
# entries have moments but no durations; on NCCL by the format only.

_MS = 1_000_000


def entries() -> list[dict[str, Any]]:
    """Return the entries of torch's recorders; none if this torch has none, or none is on."""
    recorders = recorder_dumps.read_recorders(
        entries=True, backends=recorder_dumps.hooked_backends()
    )
    found = (content.get("entries") for content in recorders)
    return [entry for entries in found if isinstance(entries, list) for entry in entries]


def add_durations(
    events: Iterable[TraceEvent], recorded: Sequence[dict[str, Any]], started_unix_ns: int
) -> None:
    """Set the duration of the events during whose issue an entry with a duration was created."""
    timed = sorted(
        (entry["time_created_ns"], entry["duration_ms"])
        for entry in recorded
        if isinstance(entry.get("duration_ms"), (int, float))
        and isinstance(entry.get("time_created_ns"), int)
    )
    moments = [moment for moment, _ in timed]
    for event in events:
        if event.count > 1 or not event.returned_ns:
            continue
        first = bisect.bisect_left(moments, started_unix_ns + event.started_ns)
        last = bisect.bisect_right(moments, started_unix_ns + event.returned_ns)
        if last - first == 1:  # another thread's may have been created meanwhile
            event.duration_ns = round(timed[first][1] * _MS)
