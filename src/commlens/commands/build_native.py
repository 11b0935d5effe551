"""``commlens build-native``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from commlens.errors import MissingDependency


class BuildNativeCommand:
    """Compile the native engine for this torch and Python: recording then costs less.

    What was built is kept in $COMMLENS_NATIVE_DIR, else in $XDG_CACHE_HOME/commlens/native (~/.cache), and every process with the same
    torch and Python uses it from then on. On a cluster: in the image, or on one node with the folder shared. Without it commlens
    records in Python.
    """

    name = "build-native"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("-o", "--output", metavar="DIR", help="the cache to build into; point COMMLENS_NATIVE_DIR there to use it")
        parser.add_argument("-f", "--force", action="store_true", help="build even where that has been done")

    def run(self, arguments: argparse.Namespace) -> int:
        """Build, and say in a line what was done."""
        import importlib.util

        if importlib.util.find_spec("torch") is None:
            raise MissingDependency.torch("commlens build-native")
        from commlens.native import build

        directory = Path(arguments.output).expanduser() if arguments.output else None
        began = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console

            with Console(stderr=True).status("Building the native engine: mostly 30 to 60 s") as shown:
                made, new = build.build(
                    directory,
                    force=arguments.force,
                    progress=lambda what: shown.update(f"Building the native engine, mostly 30 to 60 s: {what}"),
                )
        else:
            made, new = build.build(directory, force=arguments.force)
        wanted = made.about["for"]
        what = f"torch {wanted['torch']} and Python {wanted['python']}"
        if new:
            print(f"The native engine for {what} was built in {time.monotonic() - began:.0f} s with {made.about['compiler']}.")
        else:
            print(f"The native engine for {what} has been built before, on {made.about['built']} with {made.about['compiler']}.")
        print(f"It is in {made.folder}")
        return 0
