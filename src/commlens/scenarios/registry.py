"""The list of scenarios, with the expected verdict of each. Standard library only."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from commlens.errors import CommandError, did_you_mean
from commlens.scenarios import throttle
from commlens.scenarios.truth import HEALTHY, Truth, culprit_rank, marked_lines

DEFAULT = "data-loader"


class Ending(str, Enum):
    """How the unwatched job ends within its process group's timeout."""

    HANGS = "hangs"
    DIES = "dies"
    ENDS = "ends"


@dataclass(frozen=True)
class Scenario:
    """A program with one fault, or a healthy one."""

    name: str
    summary: str
    program: str  # module in commlens.scenarios.programs
    family: str
    ending: Ending
    fault: Callable[[Scenario, int], Truth] | None = None  # None: healthy
    worlds: tuple[int, ...] = (2, 4, 8)
    impossible: Callable[[], str | None] = lambda: None  # returns why it cannot run on this machine, in a sentence
    at_start: bool = False  # the fault is before the first step
    waits: bool = False  # healthy, but the ranks wait for one rank longer than the stall timeout of the demo

    def truth(self, world_size: int) -> Truth:
        """Return the expected verdict for a world size."""
        return HEALTHY if self.fault is None else self.fault(self, world_size)


def _truth(
    kinds: str,
    whys: str,
    ops: str = "",
    *,
    lines: bool = True,
    culprits: Callable[[int], tuple[int, ...]] = lambda world_size: (culprit_rank(world_size),),
) -> Callable[[Scenario, int], Truth]:
    """Return a function that makes a Truth of words separated by blanks and the lines that are marked in the program."""

    def truth(scenario: Scenario, world_size: int) -> Truth:
        marked = marked_lines(scenario.program, scenario.name) if lines else ()
        return Truth(tuple(kinds.split()), tuple(whys.split()), culprits(world_size), tuple(ops.split()), marked)

    return truth


_SKIPPED = "skipped in-collective unknown finished"


def _without_fsdp2() -> str | None:
    """Return why a program that uses ``fully_shard`` cannot run here; None if it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None  # the caller reports that
    return f"It uses fully_shard, which does not run on CPU with torch {version}." if version.startswith("2.6.") else None


_DISAGREES = "in-collective unknown user-code"

# fmt: off
SCENARIOS: tuple[Scenario, ...] = (
    # --- a rank does not reach the collective ------------------------------------------------------------------------
    Scenario(
        "data-loader", "2-d transformer (data x tensor parallel): one rank's data loader stalls", "transformer", "2-d",
        Ending.HANGS, _truth("missing", "data-loading", "all_gather all_reduce reduce_scatter"), worlds=(4, 8),
        impossible=_without_fsdp2),
    Scenario(
        "mesh-cascade", "one rank of a mesh deadlocks on its own lock; the wait spreads from its row to all ranks", "mesh", "2-d",
        Ending.HANGS, _truth("missing", "user-code", "all_reduce"), worlds=(4, 8)),
    Scenario(
        "throttled", "a noisy neighbour leaves one rank 1% of a core", "plain", "plain", Ending.HANGS,
        _truth("missing waiting", "throttled", "all_reduce"), impossible=throttle.why_not),
    Scenario("stopped", "one rank is stopped by SIGSTOP", "plain", "plain", Ending.HANGS, _truth("missing", "stopped", "all_reduce")),
    Scenario(
        "holds-gil", "one rank is stuck in C code that holds the GIL", "plain", "plain", Ending.HANGS,
        _truth("missing", "holding-gil", "all_reduce")),
    Scenario(
        "uneven-then-idle", "one rank has less data and then waits for a file", "uneven", "plain", Ending.HANGS,
        _truth("missing", "user-code", "all_reduce")),
    # --- the ranks do not get started, or wait outside of collectives -----------------------------------------------
    Scenario(
        "absent-at-start", "one rank never comes to init_process_group", "startup", "startup", Ending.HANGS,
        _truth("missing", "data-loading user-code", "init_process_group"), worlds=(4,), at_start=True),
    Scenario(
        "new-group-order", "one rank makes two groups in reverse order", "startup", "startup", Ending.HANGS,
        _truth("mismatch/group", "skipped initialising", "new_group"), worlds=(4,), at_start=True),
    Scenario(
        "mesh-shape", "one rank makes a device mesh of another shape", "startup", "startup", Ending.HANGS,
        _truth("mismatch/group", "initialising", "init_device_mesh"), worlds=(4,), at_start=True),
    Scenario(
        "unanswered-key", "the other ranks wait for a key in the store that one rank does not write this time", "startup", "startup",
        Ending.HANGS, _truth("missing", "skipped", "store.get"), worlds=(4,)),
    # --- a rank dies -------------------------------------------------------------------------------------------------
    Scenario("dies-exception", "one rank raises", "plain", "plain", Ending.DIES, _truth("dead", "exception")),
    Scenario("dies-exit", "one rank leaves with sys.exit(3)", "plain", "plain", Ending.DIES, _truth("dead", "exit")),
    Scenario("dies-hard-exit", "one rank leaves with os._exit(3)", "plain", "plain", Ending.DIES, _truth("dead", "exit")),
    Scenario("dies-sigkill", "one rank is killed by SIGKILL", "plain", "plain", Ending.DIES, _truth("dead", "killed out-of-memory")),
    Scenario("dies-sigabrt", "one rank aborts", "plain", "plain", Ending.DIES, _truth("dead", "killed")),
    # --- ranks disagree ----------------------------------------------------------------------------------------------
    Scenario(
        "skip-then-other", "one rank skips an all_reduce and moves on to an all_gather", "disagree", "plain", Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce all_gather")),
    Scenario(
        "skip-then-same", "one rank skips an all_reduce: the next ones pair up wrongly until the last one hangs", "disagree",
        "plain", Ending.HANGS, _truth("mismatch/op missing", _SKIPPED, "all_reduce barrier")),
    Scenario(
        "uneven-then-barrier", "one rank has less data and waits in the barrier at the end", "uneven", "plain", Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce barrier")),
    Scenario(
        "ddp-skip-backward", "DDP: one rank skips a backward pass", "ddp", "ddp", Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce all_gather")),
    Scenario(
        "mismatch-op", "one rank calls all_gather while the others call all_reduce", "disagree", "plain", Ending.HANGS,
        _truth("mismatch/op", _DISAGREES, "all_reduce all_gather")),
    Scenario(
        "mismatch-size", "one rank's tensor is smaller", "disagree", "plain", Ending.DIES,
        _truth("mismatch/shape", _DISAGREES, "all_gather")),
    Scenario(
        "mismatch-dtype", "one rank's tensor is bfloat16", "disagree", "plain", Ending.DIES,
        _truth("mismatch/dtype", _DISAGREES, "all_reduce")),
    Scenario(
        "mismatch-reduce-op", "one rank reduces with MAX while the others use SUM: nothing hangs, but the result is wrong",
        "disagree", "plain", Ending.ENDS, _truth("mismatch/reduce-op", _DISAGREES, "all_reduce")),
    Scenario(
        "mismatch-root", "one rank expects the broadcast from another root", "disagree", "plain", Ending.HANGS,
        _truth("mismatch/root", _DISAGREES, "broadcast"), worlds=(4, 8)),
    Scenario(
        "fsdp2-forward-order", "FSDP2: one rank runs two blocks in reverse order", "fsdp2", "fsdp2", Ending.DIES,
        _truth("mismatch/shape", f"{_DISAGREES} skipped", "all_gather"), impossible=_without_fsdp2),
    # --- ranks wait for each other -----------------------------------------------------------------------------------
    Scenario(
        "swap-two-groups", "one rank uses two groups in reverse order", "subgroups", "subgroups", Ending.HANGS,
        _truth("cycle", _SKIPPED, "all_reduce")),
    Scenario(
        "swap-three-groups", "a deadlock through three groups of two", "subgroups", "subgroups", Ending.HANGS,
        _truth("cycle", _SKIPPED, "all_reduce"), worlds=(4, 8)),
    Scenario(
        "recv-without-send", "one rank waits for a message that no rank sends", "point_to_point", "p2p", Ending.HANGS,
        _truth("cycle missing mismatch/p2p", _SKIPPED, "recv")),
    Scenario(
        "both-recv", "both ranks of a pair receive first", "point_to_point", "p2p", Ending.HANGS,
        _truth("cycle mismatch/p2p", _SKIPPED, "recv")),
    Scenario(
        "batched-p2p-missing", "one rank omits the send from its batch", "point_to_point", "p2p", Ending.HANGS,
        _truth("missing cycle mismatch/p2p", _SKIPPED, "recv send all_reduce")),
    Scenario(
        "pipeline-lost-send", "one stage of a pipeline does not send a gradient", "pipeline", "pipeline", Ending.HANGS,
        _truth("missing cycle mismatch/p2p", _SKIPPED, "recv send")),
    # --- nothing is wrong --------------------------------------------------------------------------------------------
    Scenario("healthy-plain", "healthy: hand-written data parallelism", "plain", "plain", Ending.ENDS),
    Scenario("healthy-ddp", "healthy: DistributedDataParallel", "ddp", "ddp", Ending.ENDS),
    Scenario("healthy-fsdp2", "healthy: fully_shard", "fsdp2", "fsdp2", Ending.ENDS, impossible=_without_fsdp2),
    Scenario("healthy-tensor-parallel", "healthy: a tensor parallel transformer", "transformer", "tensor parallel", Ending.ENDS),
    Scenario(
        "healthy-2d", "healthy: fully_shard x tensor parallel", "transformer", "2-d", Ending.ENDS, worlds=(4, 8),
        impossible=_without_fsdp2),
    Scenario("healthy-mesh", "healthy: collectives on both dimensions of a mesh", "mesh", "2-d", Ending.ENDS, worlds=(4, 8)),
    Scenario("healthy-pipeline", "healthy: a pipeline", "pipeline", "pipeline", Ending.ENDS),
    Scenario("healthy-subgroups", "healthy: overlapping groups", "subgroups", "subgroups", Ending.ENDS, worlds=(4, 8)),
    Scenario("healthy-p2p", "healthy: send and receive, one by one and batched", "point_to_point", "p2p", Ending.ENDS),
    Scenario(
       
        "healthy-async", "healthy: asynchronous ops in a different but legal order on each rank", "subgroups", "subgroups", Ending.ENDS),
    Scenario(
       
        "healthy-rooted", "healthy: a root runs ahead, and the others follow on a signal in the store", "rooted", "plain", Ending.ENDS),
    Scenario("slow-checkpoint", "healthy: rank 0 writes a checkpoint for a long time", "patience", "plain", Ending.ENDS, waits=True),
    Scenario("slow-compilation", "healthy: one rank compiles for a long time", "patience", "plain", Ending.ENDS, waits=True),
    Scenario("expect-slow", "healthy: one rank is in a block marked with expect_slow", "patience", "plain", Ending.ENDS, waits=True),
)
# fmt: on
"""Every scenario, by kind of fault; healthy ones last."""


def find(name: str) -> Scenario:
    """Return the scenario with this name."""
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    close = did_you_mean(name, [scenario.name for scenario in SCENARIOS])
    raise CommandError(f"There is no scenario {name!r}.{close} `commlens demo --list` lists them.")
