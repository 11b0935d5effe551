"""Throttle the calling process with a control group of a small CPU quota. Linux only; needs the right to create one.

A small helper process outlives the caller and removes the group when the caller has ended.
"""

from __future__ import annotations

import os
from pathlib import Path

PERIOD_US = 100_000
QUOTA_US = 1_000  # one hundredth of a core
LIFETIME_S = 120


def _cgroup_parent() -> tuple[Path, bool] | None:
    """Return the folder in which to create the group, and whether it is cgroup v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            for mount in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"):
                for parent in (Path(mount + path), Path(mount)):
                    if (parent / "cpu.cfs_quota_us").exists() or (
                        parent == Path(mount) and (parent / "cgroup.procs").exists()
                    ):
                        return parent, False
    root = Path("/sys/fs/cgroup")
    try:
        if "cpu" in (root / "cgroup.subtree_control").read_text().split():
            return root, True
    except OSError:
        pass
    return None


def why_not() -> str | None:
    """Return why this machine cannot throttle a process, in a sentence; None if it can."""
    try:
        found = _cgroup_parent()
        if found is None:
            return "No control group with a CPU controller is mounted here, so no process can be throttled."
        parent, v2 = found
        group = parent / f"commlens-probe-{os.getpid()}"
        group.mkdir()
        try:
            _set_quota(group, v2)
        finally:
            group.rmdir()
    except OSError as error:
        return f"A control group with a CPU quota cannot be created here: {error}."
    return None


def _set_quota(group: Path, v2: bool) -> None:
    if v2:
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))


def squeeze() -> None:
    """Limit the calling process, with all its threads, to one hundredth of a core until it ends."""
    from commlens.scenarios.lab import when_ended

    found = _cgroup_parent()
    if found is None:
        raise OSError("No control group with a CPU controller is mounted here.")
    parent, v2 = found
    group = parent / f"commlens-throttled-{os.getpid()}"
    group.mkdir()
    _set_quota(group, v2)
    when_ended(
        LIFETIME_S,
        f"i=0; while [ -d {group} ] && [ $i -lt 100 ]; do rmdir {group} 2>/dev/null || sleep 0.2; i=$((i+1)); done",
    )
    (group / "cgroup.procs").write_text(str(os.getpid()))
