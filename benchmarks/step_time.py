"""Measure what commlens adds to a training step of small models on gloo: recorded, watched, traced,
verified, next to other tools.

python benchmarks/step_time.py [--quick] [--only DDP ...] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import _modes
from _modes import Mode
from _report import Goal, Report, arguments, between, command, finish
from _sets import Measured, is_at_most, running

RECORDED = Mode("recorded", settings=_modes.recorded("auto"))
VERIFIED = Mode("verified", settings=_modes.recorded("auto", debug=True))
MODES = [
    _modes.OFF,
    RECORDED,
    _modes.WATCHED,
    _modes.TRACED,
    VERIFIED,
    _modes.COMM_DEBUG_MODE,
    _modes.DEBUG_MODE,
    _modes.DETAIL,
    _modes.ACCELERATE,
]
Step = Callable[[], object]


def trained(
    model: Any, batch: Any, loss: Callable[[Any], Any] = lambda out: out.square().mean()
) -> Step:
    """Return a training step with an optimizer."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()

    return step


def layers(count: int, width: int) -> Any:
    """Return a stack of linear layers."""
    from torch import nn

    return nn.Sequential(
        *[part for _ in range(count) for part in (nn.Linear(width, width), nn.GELU())]
    )


def ddp(rank: int, world_size: int) -> Step:
    """8 layers of 512 in buckets of 2 MB."""
    import torch

    return trained(
        torch.nn.parallel.DistributedDataParallel(layers(8, 512), bucket_cap_mb=2),
        torch.randn(128, 512),
    )


def fsdp2(rank: int, world_size: int) -> Step:
    """6 layers of 512, each sharded."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (world_size,)), layers(6, 512)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, torch.randn(128, 512))


def tp(rank: int, world_size: int) -> Step:
    """A transformer of 2 layers of 256 over a tensor-parallel mesh."""
    import torch
    from models import parallel_transformer
    from torch.distributed.device_mesh import init_device_mesh

    model = parallel_transformer(
        init_device_mesh("cpu", (world_size,)), width=256, vocabulary=256, length=64
    )
    return trained(model, torch.randint(0, 256, (4, 64)), lambda out: out.sum())


def two_dimensional(rank: int, world_size: int) -> Step:
    """The same on a mesh of 2 x 2: tensor parallel within, fully sharded across."""
    import torch
    from models import parallel_transformer
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel_transformer(mesh["tp"], width=256, vocabulary=256, length=64)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return trained(model, torch.randint(0, 256, (4, 64)), lambda out: out.sum())


def pipelined(rank: int, world_size: int) -> Step:
    """A stage of 4 layers of 256 on each rank, 4 microbatches."""
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    module = layers(4, 256)
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, target = torch.randn(256, 256), torch.randn(256, 256)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=[])
        optimizer.step()

    return step


def accelerated(rank: int, world_size: int) -> Step:
    """The DDP model with metrics that Accelerate gathers and reduces, which are the only two
    operations that its debug mode checks.
    """
    from accelerate.state import PartialState
    from accelerate.utils import gather, reduce

    PartialState(cpu=True, backend="gloo")
    step = ddp(rank, world_size)
    import torch

    metrics = torch.ones(16)

    def with_metrics() -> None:
        step()
        gather(metrics)
        reduce(metrics)

    return with_metrics


FAMILIES: dict[str, tuple[Callable[[int, int], Step], int]] = {
    "DDP": (ddp, 2),
    "FSDP2": (fsdp2, 2),
    "TP": (tp, 2),
    "2-D": (two_dimensional, 4),
    "pipelined": (pipelined, 2),
    "DDP, with Accelerate's gather and reduce": (accelerated, 2),
}


def every(answers: Iterable[bool | None]) -> bool | None:
    """Return whether all goals are met; None if none is missed but some are undecided."""
    each = list(answers)
    return False if False in each else None if None in each else True


def goals(found: dict[tuple[str, str], Measured], alone: dict[str, Measured]) -> list[Goal]:
    """Return the goals of the design, with what was measured."""
    result = []
    if alone:
        shown = ", ".join(
            f"{family} {one.ratio:.3f} ({between(one.ratio_interval, 3)}, {one.rounds} rounds)"
            for family, one in alone.items()
        )
        met = every(one.takes_at_most(1.02) for one in alone.values())
        result.append(
            Goal(
                "A recorded and watched step takes at most 1.02 times as long (95% confidence)",
                shown,
                met,
            )
        )
    adds = {
        family: (ours, found[(family, "torch CommDebugMode")])
        for (family, way), ours in found.items()
        if way == "traced" and (family, "torch CommDebugMode") in found
    }
    if adds:
        shown = ", ".join(
            f"{family} {ours.added_us / 1000:.2f} of {theirs.added_us / 1000:.2f} ms"
            for family, (ours, theirs) in adds.items()
        )
        met = every(
            is_at_most(ours.added_us_quartiles, theirs.added_us / 3)
            for ours, theirs in adds.values()
        )
        result.append(
            Goal("Tracing adds at most a third of what CommDebugMode adds to a step", shown, met)
        )
    return result


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--seconds", type=float, default=20, help="seconds for each family, spent twice"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps in a block")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    given = parser.parse_args()
    seconds = 4.0 if given.quick else given.seconds
    modes, left_out = _modes.available(MODES)
    report = Report(
        "What commlens adds to a training step",
        "One set of ranks per configuration; all train the same model in turns. Figures are"
        " medians, with quartiles, of the ratio to the bare job of the same round. Each family runs"
        " as many rounds as its time allows. A watcher runs only while its own job is measured. For"
        " the goal, the watched job is measured once more in turns with the bare job only, which"
        " allows more rounds.",
        command(),
        left_out=left_out,
    )
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    found: dict[tuple[str, str], Measured] = {}
    alone: dict[str, Measured] = {}  # watched, in turns with the bare job only
    rows = []
    for family in given.only:
        make, world_size = FAMILIES[family]
        compared = (
            (_modes.OFF, RECORDED, VERIFIED, _modes.ACCELERATE)
            if make is accelerated
            else [m for m in MODES if not m.accelerate_debug]
        )
        here = [mode for mode in modes if mode in compared]
        try:
            with running(here, "gloo", world_size, prepare(make), per_step=True) as sets:
                measured = sets.compare(
                    "step", rounds=given.rounds, runs=given.steps, seconds=seconds
                )
                if _modes.WATCHED in here and _modes.WATCHED.name not in sets.failed:
                    only = (_modes.OFF, _modes.WATCHED)
                    alone[family] = sets.compare(
                        "step", rounds=10 * given.rounds, runs=3, seconds=seconds, only=only
                    )[1]
                report.left_out += [
                    f"{family} does not run under {name}: {why}."
                    for name, why in sets.failed.items()
                ]
        except Exception as error:
            report.left_out.append(
                f"{family} could not be measured: {type(error).__name__}: {error}"
            )
            continue
        alone_here = [alone[family]] if family in alone else []
        for one in measured:
            found[(family, one.mode)] = one
        for one in [*measured, *alone_here]:
            report.rows.append(
                {
                    "family": family,
                    "ranks": world_size,
                    "alone": one is alone.get(family),
                    **dataclasses.asdict(one),
                }
            )
        by_mode = {one.mode: one for one in measured}
        cells = [
            (
                f"{by_mode[mode.name].ratio:.3f} ({between(by_mode[mode.name].ratio_quartiles)})"
                if mode.name in by_mode
                else ""
            )
            for mode in modes[1:]
        ]
        first = measured[0]
        rows.append(
            [
                f"{family}, {world_size} ranks",
                f"{first.rounds} x {first.runs}",
                f"{first.us / 1000:.1f} ms",
                *cells,
            ]
        )
    report.table("", ["step", "rounds x steps", "bare", *(mode.name for mode in modes[1:])], rows)
    report.goals = goals(found, alone)
    finish(report, given)


def prepare(make: Callable[[int, int], Step]) -> Callable[[int, int, Mode], dict[str, Step]]:
    """Return the case of a family for one rank. The first step, which does the setup, is neither
    measured nor debugged.
    """

    def cases(rank: int, world_size: int, mode: Mode) -> dict[str, Step]:
        step = make(rank, world_size)
        step()
        return {"step": step}

    return cases


if __name__ == "__main__":
    main()
