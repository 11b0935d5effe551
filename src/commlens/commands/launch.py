"""``commlens launch``."""

from __future__ import annotations

import argparse


class LaunchCommand:
    """Run a script under torchrun with a black box in every worker.

    When the job stalls or dies, the verdict is printed by itself. All of torchrun's options are accepted.
    """

    name = "launch"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Everything is passed on: torchrun's own parser reads it, together with our settings."""
        parser.usage = "commlens launch [commlens's settings] [torchrun's options] script.py ... | -m module ..."
        parser.epilog = "Settings and torchrun's options: commlens launch -h"
        # No argument here begins with an option character, so that argparse hands over all of them as they are.
        parser.prefix_chars = "\0"
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run(self, arguments: argparse.Namespace) -> int:
        """Become torchrun."""
        from commlens.launch.torchrun import launch

        return launch(arguments.arguments)
