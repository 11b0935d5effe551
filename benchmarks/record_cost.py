"""What recording adds to one collective, in microseconds, beside torch's own recorder and a TorchDispatchMode.

python benchmarks/record_cost.py [--quick] [--backends fake:4 gloo:2 gloo:4] [--json FILE]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import _modes
from _modes import Mode
from _report import Goal, Report, arguments, between, command, finish, us
from _sets import Measured, running

MODES = [_modes.OFF, _modes.PYTHON, _modes.NATIVE, _modes.TORCH_RECORDER, _modes.DISPATCH_MODE]
DEPTH = 5
"""Python frames between the program's start and the collective, as a small training script has."""

FAKE = ("all_reduce", "all_reduce async", "broadcast", "all_gather_into_tensor", "torch.add")
GLOO = (
    "all_reduce",
    "all_reduce 64 KB",
    "all_reduce 1 MB",
    "all_reduce async",
    "broadcast",
    "send/recv",
    "batch_isend_irecv",
    "coalesced, 4",
)
RUNS = {"all_reduce 64 KB": 0.5, "all_reduce 1 MB": 0.1, "coalesced, 4": 0.5, "batch_isend_irecv": 0.5}


def prepare(rank: int, world_size: int, mode: Mode) -> dict[str, Callable[[], object]]:
    """The cases, for one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensor, gathered, other = torch.ones(8), torch.zeros(8 * world_size), torch.ones(8)
    medium, large, several = torch.ones(16_384), torch.ones(262_144), [torch.ones(8) for _ in range(4)]
    after, before = (rank + 1) % world_size, (rank - 1) % world_size

    def from_a_script(run: Callable[[], object], levels: int = DEPTH) -> object:
        return from_a_script(run, levels - 1) if levels else run()

    def message() -> None:
        if rank < 2:
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

    def batch() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, other, before)]):
            work.wait()

    def coalesced() -> None:
        with _coalescing_manager():
            for each in several:
                dist.all_reduce(each)

    return {
        "all_reduce": lambda: from_a_script(lambda: dist.all_reduce(tensor)),
        "all_reduce 64 KB": lambda: from_a_script(lambda: dist.all_reduce(medium)),
        "all_reduce 1 MB": lambda: from_a_script(lambda: dist.all_reduce(large)),
        "all_reduce async": lambda: from_a_script(lambda: dist.all_reduce(tensor, async_op=True).wait()),
        "broadcast": lambda: from_a_script(lambda: dist.broadcast(tensor, 0)),
        "all_gather_into_tensor": lambda: from_a_script(lambda: dist.all_gather_into_tensor(gathered, tensor)),
        "send/recv": lambda: from_a_script(message),
        "batch_isend_irecv": lambda: from_a_script(batch),
        "coalesced, 4": lambda: from_a_script(coalesced),
        "torch.add": lambda: torch.add(tensor, other),
    }


def goals(found: dict[tuple[str, str, str], Measured]) -> list[Goal]:
    """What the design promises of it."""
    result = []
    for engine, limit in (("Python engine", 15), ("native engine", 2)):
        one = found.get(("fake x4", "all_reduce", engine))
        if one is not None:
            goal = f"Recording with the {engine} adds at most {limit} us to a collective"
            result.append(Goal(goal, f"{us(one.added_us)} us (fake backend)", one.added_us <= limit))
    for backend in ("gloo x2", "gloo x4"):
        native, theirs = found.get((backend, "all_reduce", "native engine")), found.get((backend, "all_reduce", "torch's recorder"))
        if native is not None and theirs is not None:
            result.append(
                Goal(
                    f"... and at most what torch's own recorder adds ({backend}, CPU time of the rank, which is less noisy than the wall)",
                    f"{us(native.added_cpu_us)} us, torch's {us(theirs.added_cpu_us)} us",
                    native.added_cpu_us <= theirs.added_cpu_us,
                )
            )
    add = found.get(("fake x4", "torch.add", "Python engine"))
    if add is not None:
        result.append(Goal("No cost for ops that are no collectives", f"{us(add.added_us)} us on torch.add", abs(add.added_us) < 0.1))
    return result


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ops", type=int, default=200, help="in a block")
    parser.add_argument("--backends", nargs="+", default=["fake:4", "gloo:2", "gloo:4"])
    given = parser.parse_args()
    rounds, ops = (8, 60) if given.quick else (given.rounds, given.ops)
    modes, left_out = _modes.available(MODES)
    report = Report(
        "What recording adds to a collective",
        f"One set of ranks for each way, all running the same loop in turns: medians of {rounds} rounds of blocks of {ops} ops, in "
        "microseconds, with quartiles of what is added. CPU is the slowest rank's own.",
        command(), left_out=left_out,
    )  # fmt: skip
    found: dict[tuple[str, str, str], Measured] = {}
    for item in given.backends:
        backend, _, size = item.partition(":")
        label = f"{backend} x{size}"
        rows = []
        with running(modes, backend, int(size), prepare) as sets:
            for case in FAKE if backend == "fake" else GLOO:
                runs = max(5, int(ops * RUNS.get(case, 1)))
                measured = sets.compare(case, rounds=rounds, runs=runs)
                for one in measured:
                    found[(label, case, one.mode)] = one
                    report.rows.append({"backend": label, **dataclasses.asdict(one)})
                added = [f"{us(one.added_us)} ({between(one.added_us_quartiles, 1)}); CPU {us(one.added_cpu_us)}" for one in measured[1:]]
                rows.append([case, us(measured[0].us), *added])
        report.table(f"**{label}**", ["op", "bare", *(f"{mode.name} adds" for mode in modes[1:])], rows)
    report.goals = goals(found)
    finish(report, given)


if __name__ == "__main__":
    main()
