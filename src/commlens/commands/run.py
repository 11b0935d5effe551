"""``commlens run``."""

from __future__ import annotations

import argparse

from commlens.commands import add_program, program_of


class RunCommand:
    """Run a script as one worker with a black box, under any other launcher.

    For example: srun commlens run train.py; torchrun -m commlens run train.py; accelerate launch -m commlens run train.py.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from commlens.launch.options import add_settings

        parser.usage = "commlens run [settings] script.py ... | commlens run [settings] -m module ..."
        add_settings(parser)
        add_program(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.config import settings_environment, variable_of
        from commlens.launch import worker
        from commlens.launch.options import OPTIONS, settings_from

        program = program_of(arguments, "run train.py --lr 0.1")
        given = settings_from(arguments)
        # Pass on only what was given here: the worker finds the rest in the same places.
        chosen = {name for name in OPTIONS if given.origins[name] == "command line"}
        names = {variable_of(name) for name in chosen}
        environment = {name: value for name, value in settings_environment(given.settings).items() if name in names}
        if arguments.commlens_config_file:
            environment["COMMLENS_CONFIG_FILE"] = arguments.commlens_config_file
        worker.run(program, module=arguments.module, environment=environment)
