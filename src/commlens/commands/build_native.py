"""``commlens build-native``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from commlens.commands.progress import working
from commlens.errors import require_torch


class BuildNativeCommand:
    """Build the native engine for this torch and Python, which makes recording cheaper.

    The build is kept in $COMMLENS_NATIVE_DIR, otherwise in $XDG_CACHE_HOME/commlens/native
    (~/.cache). Every process with the same torch and Python then uses it. For a cluster, build it
    into the image, or on one node into a shared folder. Without it, commlens records in Python.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-o",
            "--output",
            metavar="DIR",
            help="build into this folder; set COMMLENS_NATIVE_DIR to it to use the build",
        )
        parser.add_argument(
            "-f", "--force", action="store_true", help="build again even if there is a build"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        require_torch("commlens build-native")
        from commlens.native import build

        directory = Path(arguments.output).expanduser() if arguments.output else None
        began = time.monotonic()
        with working("Building the native engine, usually 30 to 60 s") as progress:
            made, new = build.build(directory, force=arguments.force, progress=progress)
        target = f"torch {made.about['for']['torch']} and Python {made.about['for']['python']}"
        if new:
            print(
                f"Built the native engine for {target} in {time.monotonic() - began:.0f} s with"
                f" {made.about['compiler']}."
            )
        else:
            print(
                f"The native engine for {target} exists already, built on {made.about['built']}"
                f" with {made.about['compiler']}."
            )
        print(f"It is in {made.folder}")
        return 0
