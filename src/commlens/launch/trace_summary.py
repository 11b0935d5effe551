"""What the launcher says of its workers' traces when the job has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from commlens.errors import CommlensError


def say_what_was_traced(directory: str, *, since: float) -> None:
    """Print, on standard error, a few lines on the first rank's trace, and where all of them are.

    Args:
        directory: where the workers saved them.
        since: Unix time when the job began; older files are another job's.
    """
    from commlens.reports.trace_short import short_summary
    from commlens.traces.trace import Trace

    try:
        files = [path for path in Path(directory).glob("trace*.json") if path.stat().st_mtime >= since - 1]
        if not files:
            print(f"commlens: no worker saved a trace in {directory}.", file=sys.stderr)
            return
        files.sort(key=lambda path: (len(path.name), path.name))
        print(short_summary(Trace.load(files[0]).to_summary()), file=sys.stderr)
        shown = os.path.relpath(directory)
        if len(files) == 1:
            print(f"commlens: commlens view {os.path.relpath(files[0])} shows all of it.", file=sys.stderr)
        else:
            print(
                f"commlens: {len(files)} traces in {shown}; commlens view {shown} merges them and says where ranks differ.", file=sys.stderr
            )
    except (CommlensError, OSError) as error:
        print(f"commlens: the traces in {directory} could not be read: {error}", file=sys.stderr)
