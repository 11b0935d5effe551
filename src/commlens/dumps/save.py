"""Save dumps: copies of black boxes out of memory, with the observations of their processes. See docs/dumps.md.

Standard library and msgspec only: the watcher saves dumps beside a training job. Only files made by commlens are ever deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from commlens.blackbox import board, job_dirs, refusal_log
from commlens.blackbox.reader import SIZE_MAX, BoxStatus, OpenBox, reason
from commlens.dumps.detect import (
    BLACK_BOX,
    BOX_NAME,
    DUMP_MARKER,
    DUMP_SCHEMA,
    HEAD_BYTES,
    MARKER,
    OBSERVED,
    OBSERVED_MAX,
    OBSERVED_SCHEMA,
    REPORT,
    REPORT_NAME,
    detect_kind,
)
from commlens.errors import DumpError, FormatError
from commlens.model.ranklog import Observation

BOX_BYTES_MAX: Final = SIZE_MAX  # largest box that is saved, in bytes
PRIVATE: Final = 0o600  # permissions that let nobody but the owner read a file
_OBSERVED_NAME: Final = re.compile(r"observed-[A-Za-z0-9._-]+\.json")
_TEMPORARY_NAME: Final = re.compile(
    r"\.(rank-?\d+\.\d+\.box|observed-[A-Za-z0-9._-]+\.json|commlens-dump\.json|(index|verdict)[A-Za-z0-9._-]*\.(html|json))\.\d+\.tmp"
)
_KIND_BY_NAME: Final = (
    (BOX_NAME, BLACK_BOX),
    (_OBSERVED_NAME, OBSERVED),
    (re.compile(re.escape(MARKER)), DUMP_MARKER),
    (REPORT_NAME, REPORT),
)
_JOB_FILES: Final = frozenset({".lock", ".watcher"})  # beside the boxes of a live job
_BOARD_NAME: Final = re.compile(r"rank\d+\.\d+\.(board|making)")
_STAMP: Final = re.compile(r"-\d{8}-\d{6}\b")
_NO_NAME: Final = re.compile(r"(job|none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})-(?=.)")
_SAME_START_NS: Final = 600_000_000_000  # the nodes of a job start within this time


class _SavedRank(msgspec.Struct):
    pid: int = 0


class _SavedObservations(msgspec.Struct):
    ranks: dict[str, _SavedRank] = {}
    saved: dict[str, int] = {}


def dump_name(folders: Sequence[Path]) -> str:
    """Return a job's name in reports, which is also that of its dump: script, start and job id. A later run may have the same id.

    Args:
        folders: of the job's live boxes, the first one named after the job.
    """
    return _name_and_start(folders)[0]


def _name_and_start(folders: Sequence[Path]) -> tuple[str, int]:
    """Return the name, and the Unix ns at which the first box was made; 0 if that is unknown or already in the job's name."""
    job = job_dirs.safe_name(folders[0].name)
    statuses: list[BoxStatus] = []
    for box in () if _STAMP.search(job) else [box for folder in folders for box in job_dirs.boxes(folder)]:
        with contextlib.suppress(FormatError), OpenBox(box) as opened:
            statuses.append(opened.status())
    if not statuses:
        return job, 0
    began_ns = min(status.created_ns for status in statuses)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began_ns // 1_000_000_000 % (1 << 36)))
    program = Path(min(statuses, key=lambda status: status.rank).script.split(" ")[0]).stem.lstrip("-")
    script = [job_dirs.safe_name(program, 40)] if program else []
    job = _NO_NAME.sub("", job, count=1)
    return "-".join([job, stamp] if script and job.startswith(script[0]) else [*script, stamp, job]), began_ns


def _choose_target(dump_root: Path, folders: Sequence[Path], host: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder for a job's dump and the content of its marker.

    It is the one of an earlier dump of the same run, perhaps of another node; never one of another run, which may have the same id.
    """
    name, began_ns = _name_and_start(folders)
    marker: dict[str, Any] = {"schema": DUMP_SCHEMA, "job": folders[0].name, "began_ns": {host: began_ns}}
    if not began_ns:
        return dump_root / name, marker
    taken: set[str] = set()
    near: list[tuple[int, Path, dict[str, int]]] = []
    for path in sorted(dump_root.iterdir()) if dump_root.is_dir() else []:
        with contextlib.suppress(OSError), _opened_folder(path) as folder:
            known = _read_marker(folder)
            starts = known.get("began_ns") if known is not None else None
            if known is None or not isinstance(starts, dict):
                continue
            taken.add(path.name)
            nearest_ns = min((abs(start - began_ns) for start in starts.values() if isinstance(start, int)), default=_SAME_START_NS)
            if known.get("job") == marker["job"] and (starts[host] == began_ns if host in starts else nearest_ns < _SAME_START_NS):
                near.append((nearest_ns, path, starts))
    if near:
        _, path, starts = min(near, key=lambda each: each[0])
        return path, {**marker, "began_ns": {**starts, host: began_ns}}
    names = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return dump_root / next(each for each in names if each not in taken), marker


def save_dump(
    job_dir: Path, dump_root: Path, observations: Mapping[int, Observation], *, host: str, keep: int,
    mode: int = PRIVATE, folders: Sequence[Path] = (),
) -> Path:  # fmt: skip
    """Copy a job's black boxes and the observations of their processes to ``<dump_root>/<name>/``, with :func:`dump_name`.

    A live box is copied as it is at that moment. Saving again overwrites the run's files of the same name. Each file appears
    whole or not at all. Only the newest ``keep`` folders made by commlens are kept.

    Args:
        job_dir: folder of the live boxes.
        dump_root: folder for all dumps; created if missing.
        observations: by global rank.
        host: this machine's name; on a shared file system, several machines save into one folder.
        keep: number of job folders to keep, including this one; at least 1.
        mode: permissions of the files; the folder is also searchable by all who may read it.
        folders: all folders of the job's live boxes, if there are several.

    Returns:
        The job's folder.

    Raises:
        DumpError: nothing could be saved, or a file could not be written.
    """
    job = ""
    newest: dict[int, BoxStatus] = {}
    saved: dict[str, int] = {}
    notes: list[str] = []
    boxes = job_dirs.boxes(job_dir)
    if not boxes and not observations:
        raise DumpError(f"There are no black boxes in {job_dir} to save.")
    target, marker = _choose_target(dump_root, folders or [job_dir], host)
    name = target.name
    with _folder_to_fill(target, mode) as (folder, created, may_mark):
        try:
            if may_mark:
                _write(folder, name := MARKER, _json({**marker, "saved_ns": time.time_ns()}), mode)
            for path in boxes:
                name = path.name
                size = path.lstat().st_size if path.exists() else 0
                if size > BOX_BYTES_MAX:
                    notes.append(f"{name} was not saved: it has {size} bytes, more than the limit of {BOX_BYTES_MAX}.")
                    continue
                try:
                    with OpenBox(path) as box:
                        status = box.status()
                        content = box.packed()
                except FormatError as error:
                    notes.append(f"{name} was not saved: {error}")
                    continue
                _write(folder, name, content, mode)
                saved[name] = time.time_ns()
                job = job or status.job
                known = newest.get(status.rank)
                if known is None or known.created_ns < status.created_ns:
                    newest[status.rank] = status
            name = _observed_name(host)
            pids, saved_ns = _saved_before(folder, name)
            pids |= {rank: status.pid for rank, status in newest.items()}
            content = _observed(host, job or job_dir.name, saved_ns | saved, observations, pids, notes)
            _write(folder, name, content, mode)
        except OSError as error:
            if created and not saved:
                _discard(target)
            raise DumpError(
                f"The dump in {target} is not complete: {name} could not be written ({reason(error)}); "
                f"{len(saved)} of {len(boxes)} black boxes were saved. Choose another folder with the setting dump_dir."
            ) from error
    if boxes and not saved:
        raise DumpError(f"None of the {len(boxes)} black boxes in {job_dir} could be saved: {notes[0]}")
    _prune(dump_root, keep=max(keep, 1), current=target.name)
    return target


class SavedRank(NamedTuple):
    """A rank of another node, for :func:`add_node`."""

    rank: int
    pid: int
    observation: Observation
    box: bytes  # packed; empty if there is none
    captured_ns: int  # Unix ns


def add_node(folder: Path, ranks: Sequence[SavedRank], *, host: str, job: str, restart: int = 0, mode: int = PRIVATE) -> None:
    """Add the ranks of another node to a dump, as that node would save them.

    Args:
        folder: of the dump.
        ranks: of the other node.
        host: its name.
        job: the name of the job in the dump: the boxes of the other node may have another one, if nothing names the job there.
        restart: likewise: torchelastic counts a restart only on the node whose workers failed.
        mode: the files' permissions.

    Raises:
        DumpError: one of the files could not be written.
    """
    saved = {job_dirs.box_name(each.rank, each.pid): each for each in ranks if each.box}
    try:
        with _opened_folder(folder) as opened:
            for name, each in saved.items():
                _write(opened, name, each.box, mode)
            times = {name: each.captured_ns for name, each in saved.items()}
            observations = {each.rank: each.observation for each in ranks}
            pids = {each.rank: each.pid for each in ranks}
            _write(opened, _observed_name(host), _observed(host, job, times, observations, pids, [], restart=restart), mode)
    except OSError as error:
        raise DumpError(f"The ranks of {host} could not be added to the dump in {folder}: {reason(error)}.") from error


def holds(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a dump has one of these black boxes."""
    try:
        with _opened_folder(folder) as opened:
            return bool(set(_names(opened)) & set(names))
    except OSError:
        return False


def save_reports(folder: Path, *, host: str, page: bytes, verdict: bytes, for_all_nodes: bool = False, mode: int = PRIVATE) -> Path:
    """Save a verdict (JSON) and its page (HTML) beside a dump, and return the page's path: ``verdict.json`` and ``index.html``.

    If several nodes save into the folder and none reports for all of them, each has its own verdict, and the file names contain the host.

    Raises:
        DumpError: one of the files could not be written.
    """
    own = _observed_name(host)
    try:
        with _opened_folder(folder) as opened:
            shared = not for_all_nodes and any(_OBSERVED_NAME.fullmatch(name) and name != own for name in _names(opened))
            suffix = f"-{job_dirs.safe_name(host)}" if shared else ""
            _write(opened, f"verdict{suffix}.json", verdict, mode)
            _write(opened, f"index{suffix}.html", page, mode)
    except OSError as error:
        raise DumpError(f"The verdict could not be written beside the dump in {folder}: {reason(error)}.") from error
    return folder / f"index{suffix}.html"


def discard_job(job_dir: Path) -> None:
    """Delete a live job's black boxes, then its folder.

    Only files made by commlens are deleted; a folder with other files stays. Other processes may do the same concurrently.
    """
    _discard(job_dir)


def _saved_before(folder: int, name: str) -> tuple[dict[int, int], dict[str, int]]:
    """Return pids by rank and times by file name from this host's earlier observed-*.json, for boxes that still exist.

    A job whose boxes are in several folders (because one was full) is saved in several calls.
    """
    try:
        before = msgspec.json.decode(_peek(folder, name, OBSERVED_MAX) or b"", type=_SavedObservations)
    except (ValueError, RecursionError):
        return {}, {}
    present = set(_names(folder))
    pids = {
        int(rank): entry.pid
        for rank, entry in before.ranks.items()
        if rank.isdecimal() and job_dirs.box_name(int(rank), entry.pid) in present
    }
    return pids, {name: at_ns for name, at_ns in before.saved.items() if name in present}


def _observed_name(host: str) -> str:
    return f"observed-{job_dirs.safe_name(host)}.json"


def _observed(
    host: str, job: str, saved: Mapping[str, int], observations: Mapping[int, Observation], pids: Mapping[int, int], notes: Sequence[str],
    **more: int,
) -> bytes:  # fmt: skip
    ranks = {str(rank): {"pid": pids.get(rank, 0), **_known_fields(observation)} for rank, observation in sorted(observations.items())}
    about = {"schema": OBSERVED_SCHEMA, "host": host, "job": job, **more, "saved": saved}
    return _json({**about, "problems": notes, "ranks": ranks})


def _known_fields(observation: Observation) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(observation)
    return {name: value for name, value in fields.items() if value is not None}


def _json(content: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


@contextlib.contextmanager
def _folder_to_fill(target: Path, mode: int) -> Iterator[tuple[int, bool, bool]]:
    """Yield the folder's descriptor, whether it was just created, and whether commlens may mark it.

    A folder that exists keeps its mode.

    A folder with other programs' files takes the dump but is never marked, so it is never pruned.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.mkdir(0o700)
            created = True
        except FileExistsError:
            created = False
        folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if created:
            os.fchmod(folder, mode | (mode & 0o444) >> 2)
    except (OSError, ValueError) as error:
        raise DumpError(
            f"No dump could be written to {target}: {reason(error)}. Choose another folder with the setting dump_dir."
        ) from error
    try:
        yield folder, created, created or not _names(folder) or _marked_at(folder) is not None
    finally:
        os.close(folder)


def _write(folder: int, name: str, content: bytes, mode: int) -> None:
    """Write a file whole or not at all."""
    temporary = f".{name}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        try:
            os.fchmod(descriptor, mode)  # not narrowed by the umask
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)  # some file systems report a full disk only here
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _prune(dump_root: Path, *, keep: int, current: str) -> None:
    """Delete the oldest marked job folders beyond ``keep``. Undeletable ones stay."""
    marked: list[tuple[int, str]] = []
    try:
        names = sorted(path.name for path in dump_root.iterdir())
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError), _opened_folder(dump_root / name) as folder:
            saved_ns = _marked_at(folder)
            if saved_ns is not None and name != current:
                marked.append((saved_ns, name))
    for _, name in sorted(marked, reverse=True)[keep - 1 :]:
        _discard(dump_root / name)


@contextlib.contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _peek(folder: int, name: str, length: int) -> bytes | None:
    """Return the beginning of a regular file in a folder; None for anything else."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return None
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    try:
        return os.pread(descriptor, length, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _marked_at(folder: int) -> int | None:
    """Return when commlens last saved into this folder (Unix ns), from its marker; None without one."""
    marker = _read_marker(folder)
    saved_ns = marker.get("saved_ns") if marker is not None else None
    return None if marker is None else saved_ns if isinstance(saved_ns, int) else 0


def _read_marker(folder: int) -> dict[str, Any] | None:
    """Return the content of the marker in a folder; None if commlens has not made the folder."""
    try:
        marker = msgspec.json.decode(_peek(folder, MARKER, 4096) or b"")
    except (ValueError, RecursionError):
        return None
    return marker if isinstance(marker, dict) and marker.get("schema") == DUMP_SCHEMA else None


def _discard(path: Path) -> None:
    """Delete commlens's files in a folder, the marker last, and the folder if it is then empty."""
    with contextlib.suppress(OSError), _opened_folder(path) as folder:
        for name in sorted(_names(folder), key=lambda name: name == MARKER):
            if _is_own(folder, name):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
    with contextlib.suppress(OSError):
        if not path.is_symlink():
            path.rmdir()


def _is_own(folder: int, name: str) -> bool:
    head = _peek(folder, name, HEAD_BYTES)
    if head is None:
        return False
    for pattern, kind in _KIND_BY_NAME:
        if pattern.fullmatch(name):
            return detect_kind(head) is kind or (kind is BLACK_BOX and not any(head))  # all zero: its process died creating it
    if _BOARD_NAME.fullmatch(name):
        return head[:8] == board.MAGIC.to_bytes(8, "little") or not any(head)
    return bool(_TEMPORARY_NAME.fullmatch(name)) or (name in _JOB_FILES and not head) or name == refusal_log.NAME
