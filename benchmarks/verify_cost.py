"""Measure what strict verification, TORCH_DISTRIBUTED_DEBUG=DETAIL and Accelerate's debug mode add
to a synchronous collective on gloo.

python benchmarks/verify_cost.py [--quick] [--ranks 2 4] [--json FILE]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import _modes
from _modes import Mode
from _report import Goal, Report, arguments, between, command, finish, us
from _sets import Measured, running

SIZES = {"4 B": 1, "64 KB": 16_384, "1 MB": 262_144, "16 MB": 4_194_304}
MODES = [_modes.OFF, _modes.PYTHON, _modes.VERIFIED_PYTHON, _modes.VERIFIED_NATIVE, _modes.DETAIL]
ACCELERATED = [_modes.OFF, _modes.VERIFIED_PYTHON, _modes.VERIFIED_NATIVE, _modes.ACCELERATE]


def prepare(rank: int, world_size: int, mode: Mode) -> dict[str, Callable[[], object]]:
    """Return an all_reduce of each size."""
    import torch
    import torch.distributed as dist

    tensors = {f"all_reduce {name}": torch.ones(numel) for name, numel in SIZES.items()}
    return {name: lambda tensor=tensor: dist.all_reduce(tensor) for name, tensor in tensors.items()}


def prepare_accelerate(rank: int, world_size: int, mode: Mode) -> dict[str, Callable[[], object]]:
    """Return Accelerate's reduce and broadcast, which its debug mode checks."""
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import broadcast, reduce

    PartialState(cpu=True, backend="gloo")
    tensors = {name: torch.ones(SIZES[name]) for name in ("4 B", "1 MB")}
    cases: dict[str, Callable[[], object]] = {}
    for name, tensor in tensors.items():
        cases[f"accelerate reduce {name}"] = lambda tensor=tensor: reduce(tensor)
        cases[f"accelerate broadcast {name}"] = lambda tensor=tensor: broadcast(tensor)
    return cases


def runs(case: str, quick: bool) -> int:
    """Return how many runs make a block: fewer of large tensors."""
    numel = next(size for name, size in SIZES.items() if case.endswith(f" {name}"))
    return max(3, min(20 if quick else 100, 2_000_000 // numel))


def goals(found: dict[tuple[int, str, str], Measured], ranks: list[int]) -> list[Goal]:
    """Return the goals of the design, with the better engine's figures."""
    result = []
    for case, limit in (
        ("all_reduce 4 B", 1.5),
        ("all_reduce 1 MB", 1.05),
        ("all_reduce 16 MB", 1.05),
    ):
        for count in ranks:
            ours = [
                one
                for (size, name, mode), one in found.items()
                if (size, name) == (count, case) and mode.startswith("verified")
            ]
            if ours:
                best = min(ours, key=lambda one: one.ratio)
                theirs = found.get((count, case, _modes.DETAIL.name))
                beside = f"; DETAIL {theirs.ratio:.2f}" if theirs is not None else ""
                measured = (
                    f"{best.ratio:.2f} ({between(best.ratio_quartiles)};"
                    f" {best.mode.removeprefix('verified, ')}{beside})"
                )
                goal = (
                    f"A verified {case} takes at most {limit} times as long as a bare one, {count}"
                    " ranks"
                )
                result.append(Goal(goal, measured, best.takes_at_most(limit)))
    return result


def main() -> None:
    """Measure for each number of ranks, and print."""
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--seconds", type=float, default=6, help="seconds for each operation and number of ranks"
    )
    given = parser.parse_args()
    seconds = 1.5 if given.quick else given.seconds
    modes, left_out = _modes.available(MODES)
    others, more = _modes.available(ACCELERATED)
    report = Report(
        "What strict verification costs",
        "One set of ranks per configuration; all issue the same operation in turns. Figures are"
        " medians, with quartiles, of the ratio to the bare operation of the same round. Each"
        " operation runs as many rounds as its time allows.",
        command(),
        left_out=list(dict.fromkeys([*left_out, *more])),
    )
    found: dict[tuple[int, str, str], Measured] = {}
    for these, make, cases in (
        (modes, prepare, [f"all_reduce {name}" for name in SIZES]),
        (
            others,
            prepare_accelerate,
            [
                f"accelerate {op} {size}"
                for op in ("reduce", "broadcast")
                for size in ("4 B", "1 MB")
            ],
        ),
    ):
        rows = []
        for ranks in given.ranks:
            with running(these, "gloo", ranks, make) as sets:
                for case in cases:
                    # where ranks wait for each other most, it varies most
                    patience = 3 * seconds if case == "all_reduce 4 B" else seconds
                    measured = sets.compare(
                        case, rounds=given.rounds, runs=runs(case, given.quick), seconds=patience
                    )
                    for one in measured:
                        found[(ranks, case, one.mode)] = one
                        report.rows.append({"ranks": ranks, **dataclasses.asdict(one)})
                    ratios = [
                        f"{one.ratio:.2f} ({between(one.ratio_quartiles)})" for one in measured[1:]
                    ]
                    rows.append(
                        [
                            f"{case}, {ranks} ranks",
                            str(measured[0].rounds),
                            f"{us(measured[0].us)} us",
                            *ratios,
                        ]
                    )
        report.table("", ["operation", "rounds", "bare", *(mode.name for mode in these[1:])], rows)
    report.goals = goals(found, given.ranks)
    finish(report, given)


if __name__ == "__main__":
    main()
