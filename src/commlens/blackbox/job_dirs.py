"""The folders of black boxes: ``<root>/commlens-<uid>/<job>/rank<r>.<pid>.box``. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from commlens.blackbox.layout import SUFFIX

_MEMORY_BACKED = frozenset({"tmpfs", "ramfs"})
_BOX_NAME = re.compile(rf"rank(\d+)\.(\d+){re.escape(SUFFIX)}")


def memory_backed(path: Path) -> bool:
    """Return whether ``path`` is on a memory file system (a disk-backed map can stall the job in page faults)."""
    best, kind = "", ""
    try:
        real = str(path.resolve())
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mount, fs_type = line.split(" ")[:3]
            mount = mount.replace("\\040", " ")
            if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
                best, kind = mount, fs_type
    except (OSError, ValueError):
        return False
    return kind in _MEMORY_BACKED


def box_roots(box_dir: str | None) -> list[Path]:
    """Return candidate folders for black boxes, the best first.

    Args:
        box_dir: the setting. If given, it is the only candidate, even on a disk: that is the user's choice.
    """
    if box_dir:
        return [Path(box_dir)]
    candidates = [Path("/dev/shm"), Path(f"/run/user/{os.getuid()}"), Path("/run/shm"), Path("/tmp")]
    return [path for path in candidates if path.is_dir() and memory_backed(path)]


def user_folder(root: Path) -> Path:
    """Return this user's folder below a root."""
    return root / f"commlens-{os.getuid()}"


def live_jobs(box_dir: str | None) -> list[Path]:
    """Return the folders of jobs with black boxes on this machine, oldest first."""
    jobs: list[Path] = []
    for root in box_roots(box_dir):
        try:
            jobs += [path for path in user_folder(root).iterdir() if path.is_dir() and not path.is_symlink()]
        except OSError:
            continue
    return sorted(jobs, key=_modified)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def boxes(job_dir: Path) -> list[Path]:
    """Return the black boxes in a job's folder, by rank and pid."""
    try:
        found = [(match, path) for path in job_dir.iterdir() if (match := _BOX_NAME.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def box_name(rank: int, pid: int) -> str:
    """Return the file name of a rank's box."""
    return f"rank{rank}.{pid}{SUFFIX}"


def box_pid(path: Path) -> int:
    """Return the pid in a box's file name; 0 for any other name."""
    match = _BOX_NAME.fullmatch(path.name)
    return int(match[2]) if match else 0


def safe_name(text: str, limit: int = 80) -> str:
    """Return ``text`` as one safe path component."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:limit]
    return cleaned or "job"


def job_identity(environ: Mapping[str, str]) -> str:
    """Return a job id that is equal on all ranks of a job on this node and unique to the job.

    The launcher sets ``COMMLENS_JOB``. Otherwise the id is derived from the variables that schedulers and launchers set alike for
    every rank, or from the parent process (``mp.spawn``, a shell script).
    """
    if environ.get("COMMLENS_JOB"):
        return safe_name(environ["COMMLENS_JOB"])
    parts: list[str] = []
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "LSB_JOBID", "PBS_JOBID",
                 "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):  # fmt: skip
        if environ.get(name):
            parts.append(f"{name}={environ[name]}")
    if not any(part.startswith(("SLURM_STEP", "OMPI", "PMIX", "PMI_", "TORCHELASTIC_RUN")) for part in parts):
        parts.append(f"parent={os.getppid()}@{start_ticks(os.getppid())}")
    label = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID") or "job"
    return f"{safe_name(label, 40)}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:10]}"


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot (``/proc/PID/stat``, field 22); 0 if it does not exist."""
    return _stat_number(pid, 22)


def parent_of(pid: int) -> int:
    """Return the parent's pid (field 4); 0 if unreadable."""
    return _stat_number(pid, 4)


def _stat_number(pid: int, field: int) -> int:
    """Return a field of ``/proc/PID/stat``, numbered from 1 as in proc(5); field 2 may contain spaces and parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rsplit(")", 1)[1].split()[field - 3])
    except (OSError, ValueError, IndexError):
        return 0
