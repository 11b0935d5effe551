"""Run the watcher as a process: ``python -m commlens.watch JOB_DIR``.

The lowest local rank starts it if no launcher watches the job. It survives a SIGKILL of that rank,
ignores Ctrl-C and hang-ups (the ranks receive those themselves, and the watcher observes how they
end), prints to the stderr that it inherits, and ends with the job. Settings come from the
environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import Any

from commlens.processes.early_handles import EarlyHandles


def main(argv: list[str]) -> int:
    """Watch the job whose folder of boxes is the only argument."""
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
        # The folder itself is the lock: it leaves no file behind, and ends with the process.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0  # another watcher is running, or the job is over
    early = EarlyHandles(folder)
    from commlens.config import absolute, load_settings
    from commlens.watch.watcher import Watcher

    settings = load_settings(strict=False).settings
    paths = {name: getattr(settings, name) for name in ("dump_dir", "metrics_file")}
    absolute_paths: dict[str, Any] = {
        name: absolute(path) for name, path in paths.items() if path is not None
    }
    settings = dataclasses.replace(settings, **absolute_paths)
    # The watcher remembers the working directory, in which it runs on_verdict. After that we leave
    # it, so that its file system can be unmounted.
    watcher = Watcher([folder], settings, early=early)
    with contextlib.suppress(OSError):
        os.chdir("/")
    watcher.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
