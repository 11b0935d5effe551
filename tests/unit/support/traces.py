"""Makes traces by hand: what a tensor-parallel MLP under FSDP2 issues, on a mesh of 2 x 4."""

from __future__ import annotations

import io
from collections.abc import Callable

import msgspec

import commlens
from commlens.model.collective import Frame, ProcessGroup
from commlens.model.trace import (
    Coverage,
    Owner,
    Phase,
    Redistribution,
    TraceData,
    TracedModule,
    TracedOp,
    TraceEvent,
)
from commlens.model.trace_summary import Summary
from commlens.model.wire_bytes import wire_bytes
from commlens.reports.trace_terminal import print_summary

SCRIPT = "/home/me/train.py"
US = 1000


def mesh_groups(rank: int, dp: int = 2, tp: int = 4) -> list[ProcessGroup]:
    return [
        ProcessGroup("4", tuple(range(rank % tp, dp * tp, tp)), "mesh_dp", "gloo", "dp"),
        ProcessGroup(
            "5", tuple(range(rank // tp * tp, (rank // tp + 1) * tp)), "mesh_tp", "gloo", "tp"
        ),
    ]


class Recorder:
    """Issues collectives one after the other."""

    def __init__(self, rank: int = 0, dp: int = 2, tp: int = 4) -> None:
        self.data = TraceData(
            commlens_version="0.1.0",
            torch_version="2.13.0",
            script=SCRIPT,
            rank=rank,
            world_size=dp * tp,
            started_unix_ns=1_700_000_000_000_000_000 + rank * US,
            groups=mesh_groups(rank, dp, tp),
        )
        self.now = 1000 * US

    def issue(
        self,
        op: str,
        group: str,
        phase: Phase | None,
        site: str | None,
        size: int,
        line: int,
        **more: object,
    ) -> None:
        index = next(i for i, candidate in enumerate(self.data.groups) if candidate.label == group)
        members = len(self.data.groups[index].ranks)
        inputs, outputs = {
            "all_gather": (size // members, size),
            "reduce_scatter": (size, size // members),
        }.get(op, (size, size))
        about: dict[str, object] = dict(  # noqa: C408
            sequence=len(self.data.events) + 1,
            op=op,
            api=f"c10d.{op}",
            phase=phase,
            group=index,
            site=site,
            call=1 if site else 0,
            source=Frame(SCRIPT, line, "step"),
            dtype="float32",
            input_bytes=inputs,
            output_bytes=outputs,
            wire_bytes=wire_bytes(op, members, inputs, outputs),
            step=self.data.steps,
            started_ns=self.now,
            returned_ns=self.now + 20 * US,
            wait_began_ns=self.now + 50 * US,
            wait_ended_ns=self.now + 90 * US,
        )
        self.data.events.append(TraceEvent(**(about | more)))  # type: ignore[arg-type]
        self.now += 100 * US

    def finish(self) -> TraceData:
        total = sum(event.count for event in self.data.events)
        self.data.coverage = Coverage(
            total, total, sum(event.count for event in self.data.events if not event.classified)
        )
        return self.data


def block(path: str) -> Owner:
    return Owner("FSDP2", path, (f"{path}.net1.weight", f"{path}.net2.weight"))


def training(
    rank: int = 0,
    *,
    layers: int = 4,
    steps: int = 2,
    dtype: str = "float32",
    setup: int | None = None,
    change: Callable[[Recorder, int], None] | None = None,
) -> TraceData:
    """A few steps of an FSDP2 + tensor-parallel MLP.

    Args:
        rank: of 8.
        layers: number of blocks.
        steps: optimizer steps.
        dtype: of what FSDP2 sends.
        setup: number of scatters before the first forward; None: unknown, and there are none.
        change: called with the recorder at the end of each step, with its number.
    """
    rec = Recorder(rank)
    root = "MLP"
    partial = Redistribution(
        None, "(Partial(sum),)", "(Replicate(),)", implicit=False, mesh="DeviceMesh((4,), 'cpu')"
    )
    implicit = msgspec.structs.replace(partial, op="aten.mm.default", implicit=True)
    width = 2 if dtype == "bfloat16" else 4
    rec.data.modules = [TracedModule(root, "train.MLP", steps)]
    for layer in range(layers):
        path = f"{root}.layers.{layer}"
        rec.data.modules.append(TracedModule(path, "train.Block", steps, 0))
        parent = len(rec.data.modules) - 1
        rec.data.modules += [
            TracedModule(f"{path}.{name}", "torch.nn.modules.linear.Linear", steps, parent)
            for name in ("net1", "net2")
        ]
    rec.data.setup_until = setup
    for _ in range(setup or 0):
        rec.issue("scatter", "tp", Phase.OUTSIDE, None, 400_000, 12, through="parallelize_module")
    for step in range(steps):
        for layer in range(layers):
            path = f"{root}.layers.{layer}"
            rec.issue(
                "all_gather",
                "dp",
                Phase.FORWARD,
                path,
                8000 * width,
                19,
                owner=block(path),
                dtype=dtype,
            )
            rec.issue(
                "all_reduce",
                "tp",
                Phase.FORWARD,
                f"{path}.net2",
                4000,
                14,
                cause=partial,
                reduce_op="SUM",
                asynchronous=True,
            )
        for layer in reversed(range(layers)):
            path = f"{root}.layers.{layer}"
            if layer:
                rec.issue(
                    "all_reduce",
                    "tp",
                    Phase.BACKWARD,
                    f"{path}.net1",
                    4000,
                    28,
                    cause=implicit,
                    reduce_op="SUM",
                )
            rec.issue(
                "reduce_scatter",
                "dp",
                Phase.BACKWARD,
                path,
                8000 * width,
                28,
                owner=block(path),
                dtype=dtype,
                reduce_op="AVG",
            )
        rec.issue(
            "all_reduce",
            "tp",
            Phase.OUTSIDE,
            None,
            64,
            29,
            through="clip_grad_norm_",
            reduce_op="SUM",
        )
        if change is not None:
            change(rec, step)
        rec.data.steps += 1
    rec.data.ops = [
        TracedOp(
            "aten.mm.default",
            1,
            Phase.FORWARD,
            f"{root}.layers.0.net1",
            ((8, 16), (16, 4)),
            ("(Replicate(),)",),
            "mesh",
        )
    ]
    return rec.finish()


def trace() -> commlens.Trace:
    """The training of rank 0."""
    return commlens.Trace(training())


def one_event(**more: object) -> TraceData:
    """A trace of a single all_reduce on tp."""
    rec = Recorder()
    rec.issue("all_reduce", "tp", Phase.FORWARD, "MLP.net2", 4000, 14)
    rec.data.events = [msgspec.structs.replace(rec.data.events[0], **more)]
    return rec.finish()


def on(data: TraceData, backend: str) -> TraceData:
    """The same trace with all groups on another backend."""
    return msgspec.structs.replace(
        data, groups=[msgspec.structs.replace(group, backend=backend) for group in data.groups]
    )


def render(summary: Summary, width: int = 80) -> str:
    """Return a summary as plain text."""
    out = io.StringIO()
    print_summary(summary, out, width=width, colour=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
