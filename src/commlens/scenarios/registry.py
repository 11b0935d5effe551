"""The list of scenarios, with the expected verdict of each. Standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from commlens.errors import CommandError, did_you_mean
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
    program: str  # module in the package's ``programs``
    family: str
    ending: Ending
    fault: Callable[[Scenario, int], Truth] | None = None  # None: healthy
    worlds: tuple[int, ...] = (2, 4, 8)
    impossible: Callable[[], str | None] = lambda: None  # returns why it cannot run on this machine, in a sentence
    at_start: bool = False  # the fault is before the first step
    waits: bool = False  # healthy, but the ranks wait for one rank longer than the stall timeout of the demo
    package: str = "commlens.scenarios"  # ``python -m PACKAGE NAME`` runs it

    def truth(self, world_size: int) -> Truth:
        """Return the expected verdict for a world size."""
        return HEALTHY if self.fault is None else self.fault(self, world_size)

    @property
    def path(self) -> Path:
        """The program's file."""
        spec = importlib.util.find_spec(f"{self.package}.programs.{self.program}")
        assert spec is not None and spec.origin is not None
        return Path(spec.origin)


def truth_of(
    kinds: str,
    whys: str,
    ops: str = "",
    *,
    lines: bool = True,
    culprits: Callable[[int], tuple[int, ...]] = lambda world_size: (culprit_rank(world_size),),
) -> Callable[[Scenario, int], Truth]:
    """Return a function that makes a Truth of words separated by blanks and the lines that are marked in the program."""

    def truth(scenario: Scenario, world_size: int) -> Truth:
        marked = marked_lines(scenario.path, scenario.name) if lines else ()
        return Truth(tuple(kinds.split()), tuple(whys.split()), culprits(world_size), tuple(ops.split()), marked)

    return truth


SKIPPED = "skipped in-collective unknown finished"


def without_fsdp2() -> str | None:
    """Return why a program that uses ``fully_shard`` cannot run here; None if it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None  # the caller reports that
    return f"It uses fully_shard, which does not run on CPU with torch {version}." if version.startswith("2.6.") else None


DISAGREES = "in-collective unknown user-code"

# fmt: off
SCENARIOS: tuple[Scenario, ...] = (
    # --- a rank does not reach the collective ------------------------------------------------------------------------
    Scenario(
        "data-loader", "2-d transformer (data x tensor parallel): one rank's data loader stalls", "transformer", "2-d",
        Ending.HANGS, truth_of("missing", "data-loading", "all_gather all_reduce reduce_scatter"), worlds=(4, 8),
        impossible=without_fsdp2),
    Scenario("stopped", "one rank is stopped by SIGSTOP", "plain", "plain", Ending.HANGS, truth_of("missing", "stopped", "all_reduce")),
    Scenario(
        "holds-gil", "one rank is stuck in C code that holds the GIL", "plain", "plain", Ending.HANGS,
        truth_of("missing", "holding-gil", "all_reduce")),
    # --- a rank dies -------------------------------------------------------------------------------------------------
    Scenario("dies-exception", "one rank raises", "plain", "plain", Ending.DIES, truth_of("dead", "exception")),
    Scenario("dies-exit", "one rank leaves with sys.exit(3)", "plain", "plain", Ending.DIES, truth_of("dead", "exit")),
    Scenario("dies-hard-exit", "one rank leaves with os._exit(3)", "plain", "plain", Ending.DIES, truth_of("dead", "exit")),
    Scenario("dies-sigkill", "one rank is killed by SIGKILL", "plain", "plain", Ending.DIES, truth_of("dead", "killed out-of-memory")),
    Scenario("dies-sigabrt", "one rank aborts", "plain", "plain", Ending.DIES, truth_of("dead", "killed")),
    # --- ranks disagree ----------------------------------------------------------------------------------------------
    Scenario(
        "skip-then-other", "one rank skips an all_reduce and moves on to an all_gather", "disagree", "plain", Ending.HANGS,
        truth_of("mismatch/op missing", SKIPPED, "all_reduce all_gather")),
    Scenario(
        "skip-then-same", "one rank skips an all_reduce: the next ones pair up wrongly until the last one hangs", "disagree",
        "plain", Ending.HANGS, truth_of("mismatch/op missing", SKIPPED, "all_reduce barrier")),
    Scenario(
        "mismatch-op", "one rank calls all_gather while the others call all_reduce", "disagree", "plain", Ending.HANGS,
        truth_of("mismatch/op", DISAGREES, "all_reduce all_gather")),
    Scenario(
        "mismatch-size", "one rank's tensor is smaller", "disagree", "plain", Ending.DIES,
        truth_of("mismatch/shape", DISAGREES, "all_gather")),
    Scenario(
        "mismatch-dtype", "one rank's tensor is bfloat16", "disagree", "plain", Ending.DIES,
        truth_of("mismatch/dtype", DISAGREES, "all_reduce")),
    Scenario(
        "mismatch-reduce-op", "one rank reduces with MAX while the others use SUM: nothing hangs, but the result is wrong",
        "disagree", "plain", Ending.ENDS, truth_of("mismatch/reduce-op", DISAGREES, "all_reduce")),
    Scenario(
        "mismatch-root", "one rank expects the broadcast from another root", "disagree", "plain", Ending.HANGS,
        truth_of("mismatch/root", DISAGREES, "broadcast"), worlds=(4, 8)),
    # --- ranks wait for each other -----------------------------------------------------------------------------------
    Scenario(
        "swap-two-groups", "one rank uses two groups in reverse order", "subgroups", "subgroups", Ending.HANGS,
        truth_of("cycle", SKIPPED, "all_reduce")),
    # --- nothing is wrong --------------------------------------------------------------------------------------------
    Scenario("healthy-plain", "healthy: hand-written data parallelism", "plain", "plain", Ending.ENDS),
    Scenario("healthy-tensor-parallel", "healthy: a tensor parallel transformer", "transformer", "tensor parallel", Ending.ENDS),
    Scenario(
        "healthy-2d", "healthy: fully_shard x tensor parallel", "transformer", "2-d", Ending.ENDS, worlds=(4, 8),
        impossible=without_fsdp2),
)
# fmt: on
"""Every scenario, by kind of fault; healthy ones last."""


def find(name: str, among: Sequence[Scenario] = SCENARIOS) -> Scenario:
    """Return the scenario with this name."""
    for scenario in among:
        if scenario.name == name:
            return scenario
    close = did_you_mean(name, [scenario.name for scenario in among])
    raise CommandError(f"There is no scenario {name!r}.{close} `commlens demo --list` lists them.")
