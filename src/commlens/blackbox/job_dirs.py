"""The folders of black boxes: ``<root>/commlens-<uid>/<job>/rank<r>.<pid>.box``. Standard library
only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from commlens import launchers
from commlens.blackbox import layout as L

_MEMORY_BACKED = frozenset({"tmpfs", "ramfs"})
_SILENT_S = 60.0
# States in /proc/PID/stat. A zombie has ended: its parent has just not reaped it yet.
ENDED = frozenset("ZXx")
TOLD: Final = ".told-"
"""Begins the name of a file in a job's folder: a rank, its content, has printed a refusal."""
NUMBERS: Final = ".numbers-"
"""Begins the name of a file in a job's folder by which ranks compare their tensors."""
NUMBERS_HEAD: Final = b"commlens numbers\n"
"""Begins such a file."""
NUMBERS_VERDICT: Final = f"{NUMBERS}verdict."
"""Begins the name of a file by which a rank hands a verdict on tensors to the watcher, which
removes it.
"""
_BOX_NAME = re.compile(rf"rank(\d+)\.(\d+){re.escape(L.SUFFIX)}")


def memory_backed(path: Path) -> bool:
    """Return whether ``path`` is on a memory file system (a disk-backed map can stall the job in
    page faults).
    """
    best, kind = "", ""
    try:
        real = str(path.resolve())
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mount, fs_type = line.split(" ")[:3]
            mount = mount.replace("\\040", " ")
            if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(
                best
            ):
                best, kind = mount, fs_type
    except (OSError, ValueError):
        return False
    return kind in _MEMORY_BACKED


def box_roots(box_dir: str | None) -> list[Path]:
    """Return candidate folders for black boxes, the best first. A given one is the only one, even
    on a disk: the user chose it. A folder with two names is returned once, by its better name.
    """
    if box_dir:
        return [Path(box_dir)]
    candidates = [
        Path("/dev/shm"),
        Path(f"/run/user/{os.getuid()}"),
        Path("/run/shm"),
        Path("/tmp"),
    ]
    folders: dict[Path, Path] = {}
    for path in candidates:
        if path.is_dir() and memory_backed(path):
            folders.setdefault(path.resolve(), path)  # /run/shm is often a link to /dev/shm
    return list(folders.values())


def user_folder(root: Path) -> Path:
    """Return this user's folder below a root."""
    return root / f"commlens-{os.getuid()}"


def live_jobs(box_dir: str | None) -> list[Path]:
    """Return the folders of jobs with black boxes on this machine, oldest first."""
    jobs: list[Path] = []
    for root in box_roots(box_dir):
        with contextlib.suppress(OSError):
            jobs += [
                path
                for path in user_folder(root).iterdir()
                if path.is_dir() and not path.is_symlink()
            ]
    return sorted(jobs, key=_modified)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def boxes(job_dir: Path) -> list[Path]:
    """Return the black boxes in a job's folder, by rank and pid."""
    try:
        found = [
            (match, path) for path in job_dir.iterdir() if (match := _BOX_NAME.fullmatch(path.name))
        ]
    except OSError:
        return []
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def box_name(rank: int, pid: int) -> str:
    """Return the file name of a rank's box."""
    return f"rank{rank}.{pid}{L.SUFFIX}"


def box_pid(path: Path) -> int:
    """Return the pid in a box's file name; 0 for any other name."""
    match = _BOX_NAME.fullmatch(path.name)
    return int(match[2]) if match else 0


def events_file(folder: Path, pid: int) -> Path:
    """Return the file in which a process's plugin for NCCL notes what NCCL told it."""
    return folder / f"nccl.{pid}"


def remove_box(box: Path) -> None:
    """Delete a box, and the file of its process's plugin for NCCL."""
    for path in (box, events_file(box.parent, box_pid(box))):
        path.unlink(missing_ok=True)


def box_rank(path: Path) -> int:
    """Return the rank in a box's file name; -1 for any other name."""
    match = _BOX_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def safe_name(text: str, limit: int = 80) -> str:
    """Return ``text`` as one safe path component."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._")[:limit]
    return cleaned or "job"


def job_identity(environ: Mapping[str, str], meeting: str = "") -> str:
    """Return a job id that is equal on all ranks of a job on this node and unique to the job.

    The launcher sets ``COMMLENS_JOB``. Otherwise the id is derived from the variables that
    schedulers and launchers set alike for every rank, or from the place where the ranks meet
    (``mp.spawn``, a shell script, a rank that starts the others).

    Args:
        environ: of this process.
        meeting: the address or file at which the ranks meet; empty if unknown.
    """
    if environ.get("COMMLENS_JOB"):
        return safe_name(environ["COMMLENS_JOB"])
    known = (*launchers.PLACES, *launchers.STARTS, "TORCHELASTIC_RESTART_COUNT")
    parts = [f"{name}={environ[name]}" for name in known if environ.get(name)]
    if not any(environ.get(name) for name in launchers.STARTS):
        parts.append(f"meeting={meeting or os.getpgrp()}")
        with contextlib.suppress(OSError):
            # containers may share the memory but not the address
            parts.append(str(Path("/proc/self/ns/net").readlink()))
    label = environ.get("SLURM_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID") or "job"
    return f"{safe_name(label, 40)}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:10]}"


class Machine(NamedTuple):
    """Where a pid is valid: in one pid namespace, until the machine restarts."""

    boot_id: str
    pid_namespace: str

    @property
    def is_here(self) -> bool:
        """Whether a pid from there may be looked up here; what is unknown does not speak against
        it.
        """
        return all(theirs in ("", ours) for theirs, ours in zip(self, this_machine(), strict=True))


@functools.lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Return where this process's pid is valid; empty strings if unknown."""
    boot_id = namespace = ""
    with contextlib.suppress(OSError, ValueError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return Machine(boot_id, namespace)


class BoxOwner(NamedTuple):
    """The process that keeps a black box."""

    pid: int
    start_ticks: int  # another process may get the pid later
    machine: Machine
    heartbeat_ns: int  # Unix ns of its last sign of life
    rank: int
    world_size: int
    setup: int  # not 0: it has called init_process_group
    phase: int  # one of layout.PHASE_*

    @property
    def left(self) -> bool:
        """Whether the process has destroyed its last process group."""
        return self.phase == L.PHASE_LEFT

    @property
    def said_goodbye(self) -> bool:
        """Whether the process has destroyed its last process group, or closed its box without an
        uncaught exception.
        """
        return self.phase in (L.PHASE_LEFT, L.PHASE_CLOSED)

    @property
    def closed(self) -> bool:
        """Whether the process has closed its box: it is exiting."""
        return self.phase in L.PHASES_CLOSED

    @property
    def has_ended(self) -> bool | None:
        """Whether the process has ended; None if it is not visible from here."""
        return process_has_ended(self.pid, self.start_ticks) if self.machine.is_here else None


def owner(box: Path) -> BoxOwner | None:
    """Return the process that keeps a black box; None if its header cannot be read."""
    try:
        with box.open("rb", buffering=0) as file:
            header = file.read(L.HEADER_SIZE)
        static = header[: L.STATIC.size]
        if zlib.crc32(static) != int.from_bytes(
            header[L.STATIC_CRC_AT : L.STATIC_CRC_AT + 4], "little"
        ):
            return None
        fields = L.STATIC.unpack(static)
        about: dict[str, Any] = json.loads(header[L.ABOUT_AT : L.ABOUT_AT + fields[-2]] or b"{}")
        machine = Machine(str(about.get("boot_id", "")), str(about.get("pid_namespace", "")))
        beat, setup, phase = (
            L.LIVE_WORD.unpack_from(header, at)[0] for at in (L.HEARTBEAT_UNIX, L.SETUP, L.PHASE)
        )
        return BoxOwner(fields[10], fields[14], machine, beat, fields[11], fields[12], setup, phase)
    except (OSError, ValueError, AttributeError, struct.error):
        return None


def has_ended(box: Path) -> bool | None:
    """Return whether the process of a black box has ended; None if that is not known here."""
    found = owner(box)
    return found.has_ended if found is not None else None


def is_leftover(box: Path, *, before_s: float) -> bool:
    """Return whether a box's process has ended, and gave its last sign of life before this Unix
    time.

    A process that is not visible from here (in another container) counts as ended a minute after
    its last sign of life.
    """
    found = owner(box)
    ended = found.has_ended if found is not None else None
    try:
        written_s = box.stat().st_mtime
    except OSError:
        return False
    beat_s = found.heartbeat_ns / 1e9 if found is not None else 0.0
    last_s = beat_s if 0 < beat_s <= time.time() else written_s
    return ended is not False and last_s < before_s - (_SILENT_S if ended is None else 0)


def process_has_ended(pid: int, start_ticks: int) -> bool:
    """Return whether the process that got this pid at this time has ended, whether or not its
    parent has reaped it.
    """
    fields = stat_fields(pid)
    return int(fields[19]) != start_ticks or fields[0] in ENDED


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot (``/proc/PID/stat``, field 22); 0 if
    it does not exist.
    """
    return int(stat_fields(pid)[19])


def parent_of(pid: int) -> int:
    """Return the parent's pid (field 4); 0 if unreadable."""
    return int(stat_fields(pid)[1])


def stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third on, of proc(5); state X and zeros if
    there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - Path costs more than the read
            # Field 2, the command's name, may contain spaces and parentheses.
            fields = file.read(4096).decode("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        fields = []
    return fields if len(fields) > 19 else ["X", *["0"] * 19]


def claim(path: Path) -> bool:
    """Create an empty file; return False if another process has created it."""
    try:
        path.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file or folder; None if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # else its file system has no locks
    finally:
        os.close(descriptor)
    return False
