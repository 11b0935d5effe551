"""The launcher's summary of its workers' traces at the end of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from commlens.errors import CommlensError


def print_trace_summary(directory: str, *, since: float) -> None:
    """Print a short summary of the first rank's trace, and where the traces are, on standard error.

    Args:
        directory: where the workers saved their traces.
        since: Unix time of the job's start; older files belong to other jobs.
    """
    from commlens.reports.trace_short import short_summary
    from commlens.traces.trace import Trace

    try:
        files = [
            path
            for path in Path(directory).glob("trace*.json")
            if path.stat().st_mtime >= since - 1
        ]
        if not files:
            print(f"commlens: no worker saved a trace in {directory}.", file=sys.stderr)
            return
        files.sort(key=lambda path: (len(path.name), path.name))
        print(short_summary(Trace.load(files[0]).to_summary()), file=sys.stderr)
        shown = os.path.relpath(directory)
        if len(files) == 1:
            print(
                f"commlens: commlens view {os.path.relpath(files[0])} shows the whole trace.",
                file=sys.stderr,
            )
        else:
            print(
                f"commlens: {len(files)} traces in {shown}; commlens view {shown} shows where ranks"
                " differ.",
                file=sys.stderr,
            )
    except (CommlensError, OSError) as error:
        print(f"commlens: the traces in {directory} could not be read: {error}", file=sys.stderr)
