"""The watcher as a process of its own: ``python -m commlens.watch JOB_DIR``.

Started by the lowest local rank where no launcher watches. It outlives that rank's SIGKILL, ignores Ctrl-C and hang-ups (the
ranks get those themselves, and how they end is worth knowing), says what it has to say on the stderr that it was given, and ends
with the job. Settings come from the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import sys
from pathlib import Path

from commlens.config import load_settings
from commlens.watch.watcher import Watcher


def main(argv: list[str]) -> int:
    """Watch the job whose folder is the only argument."""
    if len(argv) != 1:
        print("usage: python -m commlens.watch JOB_DIR", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.setsid()
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # The folder itself is the lock: it leaves nothing behind, and goes with the process.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0  # somebody watches already, or the job is over
    # The job's folder may be the working directory of nobody else: do not keep a file system busy.
    settings = load_settings(strict=False).settings
    settings = dataclasses.replace(settings, dump_dir=os.path.abspath(settings.dump_dir))  # noqa: PTH100 - as settings_environment does
    with contextlib.suppress(OSError):
        os.chdir("/")
    Watcher([folder], settings).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
