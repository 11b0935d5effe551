"""Measure what recording, torch's own recorder and a TorchDispatchMode add to one collective, in
microseconds.

python benchmarks/record_cost.py [--quick] [--backends fake:4 gloo:1 gloo:2 gloo:4] [--json FILE]

CPU time is compared, because ranks also wait for each other and for a processor. The fake backend
uses no network, and neither does gloo with one rank, which otherwise does all that a rank does:
there, a single microsecond is visible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import _modes
from _modes import Mode
from _report import Goal, Report, arguments, between, command, finish, us
from _sets import Measured, running

MODES = {  # torch's recorder does not record the fake backend
    "fake": [_modes.OFF, _modes.PYTHON, _modes.NATIVE, _modes.DISPATCH_MODE],
    "gloo": [_modes.OFF, _modes.PYTHON, _modes.NATIVE, _modes.TORCH_RECORDER],
}
DEPTH = 5
"""Python frames between the program's start and the collective, as a small training script has."""

FAKE = ("all_reduce", "all_reduce async", "broadcast", "all_gather_into_tensor", "torch.add")
ALONE = ("all_reduce", "all_reduce async", "broadcast", "all_gather_into_tensor", "coalesced, 4")
GLOO = (
    "all_reduce",
    "all_reduce 1 MB",
    "all_reduce async",
    "send/recv",
    "batch_isend_irecv",
    "coalesced, 4",
)
RUNS = {"all_reduce 1 MB": 0.1, "coalesced, 4": 0.5, "batch_isend_irecv": 0.5}


def prepare(rank: int, world_size: int, mode: Mode) -> dict[str, Callable[[], object]]:
    """Return the cases for one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensor, gathered, other = torch.ones(8), torch.zeros(8 * world_size), torch.ones(8)
    large, several = torch.ones(262_144), [torch.ones(8) for _ in range(4)]
    after, before = (rank + 1) % world_size, (rank - 1) % world_size

    def from_a_script(run: Callable[[], object], levels: int = DEPTH) -> object:
        return from_a_script(run, levels - 1) if levels else run()

    def message() -> None:
        if rank < 2:
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

    def batch() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, other, before)]
        ):
            work.wait()

    def coalesced() -> None:
        with _coalescing_manager():
            for each in several:
                dist.all_reduce(each)

    return {
        "all_reduce": lambda: from_a_script(lambda: dist.all_reduce(tensor)),
        "all_reduce 1 MB": lambda: from_a_script(lambda: dist.all_reduce(large)),
        "all_reduce async": lambda: from_a_script(
            lambda: dist.all_reduce(tensor, async_op=True).wait()
        ),
        "broadcast": lambda: from_a_script(lambda: dist.broadcast(tensor, 0)),
        "all_gather_into_tensor": lambda: from_a_script(
            lambda: dist.all_gather_into_tensor(gathered, tensor)
        ),
        "send/recv": lambda: from_a_script(message),
        "batch_isend_irecv": lambda: from_a_script(batch),
        "coalesced, 4": lambda: from_a_script(coalesced),
        "torch.add": lambda: torch.add(tensor, other),
    }


def goals(found: dict[tuple[str, str, str], Measured]) -> list[Goal]:
    """Return the goals of the design, with what was measured."""
    result = []
    for engine, limit in (("Python engine", 15), ("native engine", 2)):
        one = found.get(("fake x4", "all_reduce", engine))
        if one is not None:
            goal = (
                f"Recording with the {engine}, stacks included, adds at most {limit} us to a"
                " collective"
            )
            result.append(
                Goal(goal, f"{cpu(one)} us (all_reduce, fake backend)", one.adds_at_most(limit))
            )
    for backend in ("gloo x1", "gloo x2", "gloo x4"):
        native, theirs = (
            found.get((backend, "all_reduce", "native engine")),
            found.get((backend, "all_reduce", "torch's recorder")),
        )
        if native is not None and theirs is not None:
            goal = (
                "Recording with the native engine adds at most as much as torch's own recorder"
                f" ({backend})"
            )
            result.append(
                Goal(
                    goal,
                    f"{cpu(native)} us, torch's {cpu(theirs)} us",
                    native.adds_at_most(*theirs.added_cpu_us_interval),
                )
            )
    add = [
        one
        for (_, case, mode), one in found.items()
        if case == "torch.add" and mode in ("Python engine", "native engine")
    ]
    if add:
        shown = ", ".join(f"{one.mode} {cpu(one)} us" for one in add)
        met = all(one.added_cpu_us_quartiles[0] <= 0 or one.added_cpu_us < 0.05 for one in add)
        result.append(
            Goal(
                "Recording adds nothing to ops that are not collectives",
                f"{shown} (torch.add)",
                met,
            )
        )
    return result


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--ops", type=int, default=50, help="ops in a block")
    parser.add_argument("--seconds", type=float, default=7, help="seconds for each op and backend")
    parser.add_argument("--backends", nargs="+", default=["fake:4", "gloo:1", "gloo:2", "gloo:4"])
    given = parser.parse_args()
    seconds = 1.5 if given.quick else given.seconds
    report = Report(
        "What recording adds to a collective",
        "One set of ranks per configuration; all run the same loop in turns, in short blocks."
        " Figures are microseconds of CPU time per op, on the rank that used most: the median, with"
        " quartiles, of what a block adds to the bare block of the same round. *Least* is the"
        " shortest block minus the shortest bare block, which other load disturbed least. The last"
        " figure is the median of the wall-clock time. Each case runs as many rounds as its time"
        " allows.",
        command(),
    )
    found: dict[tuple[str, str, str], Measured] = {}
    for item in given.backends:
        backend, _, size = item.partition(":")
        label = f"{backend} x{size}"
        modes, left_out = _modes.available(MODES[backend])
        report.left_out += [sentence for sentence in left_out if sentence not in report.left_out]
        rows = []
        with running(modes, backend, int(size), prepare) as sets:
            for case in FAKE if backend == "fake" else ALONE if size == "1" else GLOO:
                runs = max(5, int(given.ops * RUNS.get(case, 1)))
                measured = sets.compare(case, rounds=given.rounds, runs=runs, seconds=seconds)
                for one in measured:
                    found[(label, case, one.mode)] = one
                    report.rows.append({"backend": label, **dataclasses.asdict(one)})
                first = measured[0]
                rows.append(
                    [
                        case,
                        f"{first.rounds} x {first.runs}",
                        f"{us(first.cpu_us)}; {us(first.us)}",
                        *map(added, measured[1:]),
                    ]
                )
        report.table(
            f"**{label}** (CPU; wall)",
            ["op", "rounds x ops", "bare", *(f"{mode.name} adds" for mode in modes[1:])],
            rows,
        )
    report.goals = goals(found)
    finish(report, given)


def added(one: Measured) -> str:
    """Return the table cell for what a mode adds."""
    return f"{cpu(one)}; {us(one.added_us)}"


def cpu(one: Measured) -> str:
    """Return the CPU time that a mode adds."""
    return (
        f"**{us(one.added_cpu_us)}** ({between(one.added_cpu_us_quartiles)}; least"
        f" {us(one.added_least_us)})"
    )


if __name__ == "__main__":
    main()
