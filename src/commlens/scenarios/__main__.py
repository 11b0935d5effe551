"""One worker of a scenario: ``torchrun --nproc-per-node 4 -m commlens.scenarios NAME``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from commlens.errors import CommandError, CommlensError, MissingDependency
from commlens.scenarios.registry import SCENARIOS, Scenario, find


def main(arguments: list[str], among: Sequence[Scenario] = SCENARIOS) -> None:
    """Run the scenario named by the only argument, in this process."""
    if len(arguments) != 1:
        raise CommandError("Give exactly one argument, the scenario's name. `commlens demo --list` lists them.")
    scenario = find(arguments[0], among)
    try:
        from commlens.scenarios import lab
    except ImportError as error:
        raise MissingDependency(f"The scenarios need torch, which cannot be imported ({error}): pip install torch") from None
    lab.running_name = scenario.name
    importlib.import_module(f"{scenario.package}.programs.{scenario.program}").main()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CommlensError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, CommandError) else 2)
