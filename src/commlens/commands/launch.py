"""``commlens launch``."""

from __future__ import annotations

import argparse


class LaunchCommand:
    """Run a script under torchrun with a black box in every worker.

    If the job stalls or dies, the verdict is printed at once. All of torchrun's options are
    accepted.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Accept everything: torchrun's own parser reads it, together with our settings."""
        parser.usage = (
            "commlens launch [commlens's settings] [torchrun's options] script.py ... | -m"
            " module ..."
        )
        parser.epilog = "Settings and torchrun's options: commlens launch -h"
        # With a prefix character that no argument begins with, argparse passes all of them on
        # unchanged.
        parser.prefix_chars = "\0"
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.launch.torchrun import launch

        return launch(arguments.arguments)
