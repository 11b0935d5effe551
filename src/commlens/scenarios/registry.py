"""The list of scenarios, with what is true of each. Standard library only."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from commlens.errors import CommandError
from commlens.scenarios import throttle
from commlens.scenarios.truth import HEALTHY, Truth, culprit_rank, marked_lines

DEFAULT = "data-loader"


class Ending(str, Enum):
    """What becomes of the job when nobody watches it, until its process group's timeout."""

    HANGS = "hangs"
    DIES = "dies"
    ENDS = "ends"


@dataclass(frozen=True)
class Scenario:
    """One program with one fault, or none."""

    name: str
    summary: str
    program: str  # module in commlens.scenarios.programs
    family: str
    ending: Ending
    fault: Callable[[Scenario, int], Truth] | None = None  # None: healthy
    worlds: tuple[int, ...] = (2, 4, 8)
    impossible: Callable[[], str | None] = lambda: None  # why it cannot run on this machine, in a sentence
    waits: bool = False  # healthy, but the others wait for one rank longer than the stall timeout of the demo

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong in it."""
        return self.fault is None

    def truth(self, world_size: int) -> Truth:
        """The verdict that it must get at this world size."""
        return HEALTHY if self.fault is None else self.fault(self, world_size)


def _truth(
    kinds: str,
    whys: str,
    ops: str = "",
    *,
    lines: bool = True,
    culprits: Callable[[int], tuple[int, ...]] = lambda world_size: (culprit_rank(world_size),),
) -> Callable[[Scenario, int], Truth]:
    """A truth from words separated by blanks; the lines are those marked in the program."""

    def truth(scenario: Scenario, world_size: int) -> Truth:
        marked = marked_lines(scenario.program, scenario.name) if lines else ()
        return Truth(tuple(kinds.split()), tuple(whys.split()), culprits(world_size), tuple(ops.split()), marked)

    return truth


_SKIPPED = "skipped in-collective unknown finished"


def _without_fsdp2() -> str | None:
    """Why a program that uses ``fully_shard`` cannot run here; None where it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None  # the caller says so
    return f"It uses fully_shard, which does not run on CPU with torch {version}." if version.startswith("2.6.") else None


_DISAGREES = "in-collective unknown user-code"

SCENARIOS: tuple[Scenario, ...] = (
    # --- a rank is elsewhere -------------------------------------------------------------------------------------
    Scenario(
        "data-loader",
        "2-d transformer (data x tensor parallel): one rank's data loader stalls",
        "transformer",
        "2-d",
        Ending.HANGS,
        _truth("missing", "data-loading", "all_gather all_reduce reduce_scatter"),
        worlds=(4, 8),
        impossible=_without_fsdp2,
    ),
    Scenario(
        "mesh-cascade",
        "one rank of a mesh deadlocks on its own lock; the wait spreads from its row to everybody",
        "mesh",
        "2-d",
        Ending.HANGS,
        _truth("missing", "user-code", "all_reduce"),
        worlds=(4, 8),
    ),
    Scenario(
        "throttled",
        "a noisy neighbour leaves one rank a hundredth of a core",
        "plain",
        "plain",
        Ending.HANGS,
        _truth("missing waiting", "throttled", "all_reduce"),
        impossible=throttle.why_not,
    ),
    Scenario("stopped", "one rank is stopped by SIGSTOP", "plain", "plain", Ending.HANGS, _truth("missing", "stopped", "all_reduce")),
    Scenario(
        "holds-gil",
        "one rank sits in C code that holds the GIL",
        "plain",
        "plain",
        Ending.HANGS,
        _truth("missing", "holding-gil", "all_reduce"),
    ),
    Scenario(
        "uneven-then-idle",
        "one rank has less data and then waits for a file",
        "uneven",
        "plain",
        Ending.HANGS,
        _truth("missing", "user-code", "all_reduce"),
    ),
    # --- a rank dies -----------------------------------------------------------------------------------------------
    Scenario(
        "dies-exception",
        "one rank raises",
        "plain",
        "plain",
        Ending.DIES,
        _truth("dead", "exception"),
    ),
    Scenario("dies-exit", "one rank leaves with sys.exit(3)", "plain", "plain", Ending.DIES, _truth("dead", "exit")),
    Scenario("dies-hard-exit", "one rank leaves with os._exit(3)", "plain", "plain", Ending.DIES, _truth("dead", "exit")),
    Scenario("dies-sigkill", "one rank is killed by SIGKILL", "plain", "plain", Ending.DIES, _truth("dead", "killed out-of-memory")),
    Scenario("dies-sigabrt", "one rank aborts", "plain", "plain", Ending.DIES, _truth("dead", "killed")),
    # --- ranks disagree --------------------------------------------------------------------------------------------
    Scenario(
        "skip-then-other",
        "one rank skips an all_reduce and goes on to an all_gather",
        "disagree",
        "plain",
        Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce all_gather"),
    ),
    Scenario(
        "skip-then-same",
        "one rank skips an all_reduce: the next ones pair up wrongly, until the last",
        "disagree",
        "plain",
        Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce barrier"),
    ),
    Scenario(
        "uneven-then-barrier",
        "one rank has less data and waits in the barrier at the end",
        "uneven",
        "plain",
        Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce barrier"),
    ),
    Scenario(
        "ddp-skip-backward",
        "DDP: one rank leaves a backward out",
        "ddp",
        "ddp",
        Ending.HANGS,
        _truth("mismatch/op missing", _SKIPPED, "all_reduce all_gather"),
    ),
    Scenario(
        "mismatch-op",
        "one rank asks for all_gather where the others all_reduce",
        "disagree",
        "plain",
        Ending.HANGS,
        _truth("mismatch/op", _DISAGREES, "all_reduce all_gather"),
    ),
    Scenario(
        "mismatch-size",
        "one rank's tensor is smaller",
        "disagree",
        "plain",
        Ending.DIES,
        _truth("mismatch/shape", _DISAGREES, "all_gather"),
    ),
    Scenario(
        "mismatch-dtype",
        "one rank's tensor is bfloat16",
        "disagree",
        "plain",
        Ending.DIES,
        _truth("mismatch/dtype", _DISAGREES, "all_reduce"),
    ),
    Scenario(
        "mismatch-reduce-op",
        "one rank asks for MAX where the others SUM: nothing hangs, the result is wrong",
        "disagree",
        "plain",
        Ending.ENDS,
        _truth("mismatch/reduce-op", _DISAGREES, "all_reduce"),
    ),
    Scenario(
        "mismatch-root",
        "one rank expects the broadcast from another root",
        "disagree",
        "plain",
        Ending.HANGS,
        _truth("mismatch/root", _DISAGREES, "broadcast"),
        worlds=(4, 8),
    ),
    Scenario(
        "fsdp2-forward-order",
        "FSDP2: one rank runs two blocks in the other order",
        "fsdp2",
        "fsdp2",
        Ending.DIES,
        _truth("mismatch/shape", f"{_DISAGREES} skipped", "all_gather"),
        impossible=_without_fsdp2,
    ),
    # --- ranks wait for each other ---------------------------------------------------------------------------------
    Scenario(
        "swap-two-groups",
        "one rank uses two groups in the other order",
        "subgroups",
        "subgroups",
        Ending.HANGS,
        _truth("cycle", _SKIPPED, "all_reduce"),
    ),
    Scenario(
        "swap-three-groups",
        "a deadlock through three groups of two",
        "subgroups",
        "subgroups",
        Ending.HANGS,
        _truth("cycle", _SKIPPED, "all_reduce"),
        worlds=(4, 8),
    ),
    Scenario(
        "recv-without-send",
        "one rank waits for a message that nobody sends",
        "point_to_point",
        "p2p",
        Ending.HANGS,
        _truth("cycle missing mismatch/p2p", _SKIPPED, "recv"),
    ),
    Scenario(
        "both-recv",
        "both partners receive first",
        "point_to_point",
        "p2p",
        Ending.HANGS,
        _truth("cycle mismatch/p2p", _SKIPPED, "recv"),
    ),
    Scenario(
        "batched-p2p-missing",
        "one rank leaves the send out of its batch",
        "point_to_point",
        "p2p",
        Ending.HANGS,
        _truth("missing cycle mismatch/p2p", _SKIPPED, "recv send all_reduce"),
    ),
    Scenario(
        "pipeline-lost-send",
        "a pipeline in which one stage forgets to send a gradient",
        "pipeline",
        "pipeline",
        Ending.HANGS,
        _truth("missing cycle mismatch/p2p", _SKIPPED, "recv send"),
    ),
    # --- nothing is wrong ------------------------------------------------------------------------------------------
    Scenario("healthy-plain", "healthy: data parallel by hand", "plain", "plain", Ending.ENDS),
    Scenario("healthy-ddp", "healthy: DistributedDataParallel", "ddp", "ddp", Ending.ENDS),
    Scenario("healthy-fsdp2", "healthy: fully_shard", "fsdp2", "fsdp2", Ending.ENDS, impossible=_without_fsdp2),
    Scenario("healthy-tensor-parallel", "healthy: a tensor parallel transformer", "transformer", "tensor parallel", Ending.ENDS),
    Scenario(
        "healthy-2d", "healthy: fully_shard x tensor parallel", "transformer", "2-d", Ending.ENDS, worlds=(4, 8), impossible=_without_fsdp2
    ),
    Scenario("healthy-mesh", "healthy: collectives on both dimensions of a mesh", "mesh", "2-d", Ending.ENDS, worlds=(4, 8)),
    Scenario("healthy-pipeline", "healthy: a pipeline", "pipeline", "pipeline", Ending.ENDS),
    Scenario("healthy-subgroups", "healthy: overlapping groups", "subgroups", "subgroups", Ending.ENDS, worlds=(4, 8)),
    Scenario("healthy-p2p", "healthy: send and receive, one by one and batched", "point_to_point", "p2p", Ending.ENDS),
    Scenario("healthy-async", "healthy: asynchronous ops in other orders on other ranks, legally", "subgroups", "subgroups", Ending.ENDS),
    Scenario("healthy-rooted", "healthy: a root that goes ahead, the others follow when the store says so", "rooted", "plain", Ending.ENDS),
    Scenario("slow-checkpoint", "healthy: rank 0 writes a checkpoint for long", "patience", "plain", Ending.ENDS, waits=True),
    Scenario("slow-compilation", "healthy: one rank compiles for long", "patience", "plain", Ending.ENDS, waits=True),
    Scenario("expect-slow", "healthy: one rank is in a block marked with expect_slow", "patience", "plain", Ending.ENDS, waits=True),
)
"""Every scenario, by kind of fault; healthy ones last."""


def find(name: str) -> Scenario:
    """The scenario of this name.

    Raises:
        CommandError: when there is none.
    """
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    raise CommandError(f"There is no scenario {name!r}. `commlens demo --list` prints the names.")
