"""Take the CPU away from the calling process, and give it back: a control group with a small quota. Linux, and needs the right to make one.

Nothing is left behind: a small helper outlives the process, removes the group when it has ended, and wakes a stopped process up.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PERIOD_US = 100_000
QUOTA_US = 1_000
"""One hundredth of a core."""

LIFETIME_S = 120
_HELPER = """
i=0
while kill -0 {pid} 2>/dev/null && [ $i -lt {rounds} ]; do sleep 0.2; i=$((i+1)); done
{then}
"""


def _cgroup_parent() -> tuple[Path, bool] | None:
    """The folder under which to make the group, and whether it is cgroup v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            for mount in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"):
                for parent in (Path(mount + path), Path(mount)):
                    if (parent / "cpu.cfs_quota_us").exists() or (parent == Path(mount) and (parent / "cgroup.procs").exists()):
                        return parent, False
    root = Path("/sys/fs/cgroup")
    try:
        if "cpu" in (root / "cgroup.subtree_control").read_text().split():
            return root, True
    except OSError:
        pass
    return None


def why_not() -> str | None:
    """Why this machine cannot throttle a process, in a sentence; None where it can."""
    try:
        found = _cgroup_parent()
        if found is None:
            return "No control group with a CPU controller is mounted here, so that no process can be throttled."
        parent, v2 = found
        group = parent / f"commlens-probe-{os.getpid()}"
        group.mkdir()
        try:
            _set_quota(group, v2)
        finally:
            group.rmdir()
    except OSError as error:
        return f"A control group with a CPU quota cannot be made here: {error}."
    return None


def _set_quota(group: Path, v2: bool) -> None:
    if v2:
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))


def squeeze() -> None:
    """From here on the calling process, all its threads, gets one hundredth of a core, until it ends.

    Raises:
        OSError: where no such group can be made; :func:`why_not` tells before.
    """
    found = _cgroup_parent()
    if found is None:
        raise OSError("No control group with a CPU controller is mounted here.")
    parent, v2 = found
    group = parent / f"commlens-throttled-{os.getpid()}"
    group.mkdir()
    _set_quota(group, v2)
    _helper(LIFETIME_S, f"i=0; while [ -d {group} ] && [ $i -lt 100 ]; do rmdir {group} 2>/dev/null || sleep 0.2; i=$((i+1)); done")
    (group / "cgroup.procs").write_text(str(os.getpid()))


def wake_up_later(seconds: float) -> None:
    """Send SIGCONT to the calling process after ``seconds``, so that it does not stay stopped for ever."""
    _helper(seconds, f"kill -CONT {os.getpid()} 2>/dev/null")


def _helper(seconds: float, then: str) -> None:
    """Start a process that runs ``then`` when this one has ended or the time is over."""
    script = _HELPER.format(pid=os.getpid(), rounds=int(seconds * 5), then=then)
    null = subprocess.DEVNULL
    subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True, stdin=null, stdout=null, stderr=null)
