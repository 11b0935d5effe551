"""``commlens run``."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from commlens.commands import add_program, program_of
from commlens.errors import CommandError

_THROUGH: Final = {
    "accelerate": "accelerate launch -m commlens run train.py",
    "deepspeed": "COMMLENS=1 deepspeed train.py",
    "srun": "srun commlens run train.py",
    "mpirun": "mpirun commlens run train.py",
    "mpiexec": "mpiexec commlens run train.py",
}
"""How other launchers start workers that are recorded."""
_TORCHRUN: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


class RunCommand:
    """Run a script as one worker with a black box, under any other launcher.

    For example: srun commlens run train.py; torchrun -m commlens run train.py; accelerate launch -m
    commlens run train.py.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from commlens.launch.options import add_settings

        parser.usage = (
            "commlens run [settings] script.py ... | commlens run [settings] -m module ..."
        )
        add_settings(parser)
        add_program(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.config import settings_environment, variable_of
        from commlens.launch import worker
        from commlens.launch.options import OPTIONS, refuse_value, settings_from

        program = program_of(arguments, "run train.py --lr 0.1")
        refuse_launcher(program, module=arguments.module)
        refuse_value(arguments, program[0], module=arguments.module)
        given = settings_from(arguments)
        # Pass on only what was given here: the worker finds the rest in the same places.
        chosen = {name for name in OPTIONS if given.origins[name] == "command line"}
        names = {variable_of(name) for name in chosen}
        environment = {
            name: value
            for name, value in settings_environment(given.settings).items()
            if name in names
        }
        if arguments.commlens_config_file:
            environment["COMMLENS_CONFIG_FILE"] = arguments.commlens_config_file
        worker.run(program, module=arguments.module, environment=environment)


def refuse_launcher(program: Sequence[str], *, module: bool) -> None:
    """Refuse a launcher, which is no worker, unless it is a file of that name.

    Raises:
        CommandError: the program is a launcher, or Python itself; the message says how to record
            its workers.
    """
    first = program[0]
    name = os.path.basename(first)  # noqa: PTH119 - a module's name is no path
    if re.fullmatch(r"python[\d.]*", name) and len(program) > 1:
        raise CommandError(
            f"commlens run starts Python itself: `commlens run {shlex.join(program[1:])}`."
        )
    if not module and Path(first).exists():
        return
    if name in _TORCHRUN:
        raise CommandError(
            f"commlens run starts one worker, and {name} is a launcher: `commlens launch"
            f" {shlex.join(program[1:])}` takes its options and records its workers."
        )
    if name in _THROUGH:
        raise CommandError(
            f"commlens run starts one worker, and {name} is a launcher: it starts them, as in"
            f" `{_THROUGH[name]}`."
        )
