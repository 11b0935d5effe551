"""Save dumps: copies of black boxes out of memory, with the observations of their processes. See
docs/dumps.md.

A dump of a job of two nodes, on a shared file system::

    commlens-dumps/train-20261201-020532-4711/
        commlens-dump.json    the marker: {"job": "4711", "began_ns": {"n01": ..., "n02": ...}, ...}
        rank0.801.box ...     of node n01, by save_dump()
        observed-n01.json     what its watcher saw of the processes
        rank2.902.box ...     of node n02: by its own save_dump(), or by n01's add_node()
        observed-n02.json
        verdict.json          by save_reports()
        index.html

Several nodes may save into one folder at any time, and a later run may have the same job id: the
marker shows which run a folder is of.

Standard library and msgspec only: the watcher saves dumps beside a training job. Only files made by
commlens are ever deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from commlens.blackbox import job_dirs
from commlens.blackbox.packed import is_partial
from commlens.blackbox.reader import SIZE_MAX, BoxStatus, OpenBox, reason
from commlens.dumps.detect import BOX_NAME, DUMP_SCHEMA, MARKER, OBSERVED_MAX, OBSERVED_SCHEMA
from commlens.dumps.folder import (
    OBSERVED_NAME,
    discard,
    exists,
    folder_to_fill,
    names_in,
    opened_folder,
    peek,
    read_marker,
    remove,
    write,
)
from commlens.errors import DumpError, FormatError
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation

VERDICT: Final = "verdict.json"
VERDICT_MAX: Final = 1 << 20
"""The most bytes of a saved verdict that are read."""
EARLIER_MAX: Final = 8
EARLIER_WITHIN_NS: Final = 7 * 86_400 * 1_000_000_000
"""How many earlier verdicts are compared, and how old they may be."""
BOX_BYTES_MAX: Final = SIZE_MAX  # largest box that is saved, in bytes
PRIVATE: Final = 0o600  # permissions that let nobody but the owner read a file
_STAMP: Final = re.compile(r"-\d{8}-\d{6}\b")  # the time of a start, as in dump_name()
# beginnings of a job's name that say nothing: ours, torchrun's default id, a random id
_NO_NAME: Final = re.compile(r"(job|none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})-(?=.)")
_SAME_START_NS: Final = 600_000_000_000  # the nodes of a job start within this time


# the parts of an observed-*.json that are read back to save again


class _SavedRank(msgspec.Struct):
    pid: int = 0


class _SavedObservations(msgspec.Struct):
    ranks: dict[str, _SavedRank] = {}
    saved: dict[str, int] = {}
    job: str = ""
    restart: int | None = None


class _Before(NamedTuple):
    """The facts that were saved about a host's ranks before, as far as their boxes are still in the
    dump.
    """

    pids: Mapping[int, int] = MappingProxyType({})  # by rank
    saved: Mapping[str, int] = MappingProxyType({})  # file name: Unix ns
    # job and restart by which the node that reports has added them; None: they saved themselves
    run: tuple[str, int] | None = None


def dump_name(folders: Sequence[Path]) -> str:
    """Return a job's name in reports, which is also that of its dump: script, start and job id. A
    later run may have the same id.

    Args:
        folders: of the job's live boxes, the first one named after the job.
    """
    return _name_of(folders, _statuses(folders))


def _statuses(folders: Sequence[Path]) -> list[BoxStatus]:
    """Return the statuses of the black boxes that can be read, the lowest rank first."""
    statuses: list[BoxStatus] = []
    for box in [box for folder in folders for box in job_dirs.boxes(folder)]:
        with contextlib.suppress(FormatError), OpenBox(box) as opened:
            statuses.append(opened.status())
    return sorted(statuses, key=lambda status: status.rank)


def _is_stamped(folders: Sequence[Path]) -> bool:
    """Return whether the job's own name holds the time of its start."""
    return _STAMP.search(job_dirs.safe_name(folders[0].name)) is not None


def _name_of(folders: Sequence[Path], statuses: Sequence[BoxStatus]) -> str:
    """Return the name of a job with these boxes: ``"train-20261201-020532-4711"``; or
    ``"train-1-20261201-020532"`` if the job id begins with the script's name.
    """
    job = job_dirs.safe_name(folders[0].name)
    if not statuses or _is_stamped(folders):
        return job
    began_s = _began_ns(statuses) // 1_000_000_000 % (1 << 36)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began_s))
    program = Path(statuses[0].script.split(" ")[0]).stem.lstrip("-")
    script = [job_dirs.safe_name(program, 40)] if program else []
    job = _NO_NAME.sub("", job, count=1)
    return "-".join([job, stamp] if script and job.startswith(script[0]) else [*script, stamp, job])


def _began_ns(statuses: Sequence[BoxStatus]) -> int:
    """Return when the first box was made (Unix ns); 0 if no box can be read."""
    return min((status.created_ns for status in statuses), default=0)


def _program(statuses: Sequence[BoxStatus]) -> str:
    """Return a digest of the command, with its arguments; empty if no box can be read."""
    script = statuses[0].script.encode("utf-8", "replace") if statuses else b""
    return hashlib.sha256(script).hexdigest()[:16] if statuses else ""


def _choose_target(
    dump_root: Path, folders: Sequence[Path], host: str
) -> tuple[Path, dict[str, Any]]:
    """Return the folder for a job's dump and the content of its marker.

    It is the one of an earlier dump of the same run, perhaps of another node; never one of another
    run, which may have the same id. Two dumps are of one run if they have the same job id and the
    run began within ten minutes; on the same host, at exactly the same time.
    """
    statuses = _statuses(folders)
    name = _name_of(folders, statuses)
    began_ns = 0 if _is_stamped(folders) else _began_ns(statuses)
    marker: dict[str, Any] = {
        "schema": DUMP_SCHEMA,
        "job": folders[0].name,
        "began_ns": {host: began_ns},
        "program": _program(statuses),
        "started_ns": _began_ns(statuses),
    }
    if not began_ns:  # no box can be read, or the name itself holds the start
        return dump_root / name, marker
    taken: set[str] = set()
    of_run: list[tuple[int, Path, dict[str, Any]]] = []  # dumps, with how far apart the starts are
    for path, folder, known in _marked_in(dump_root):
        if not isinstance(known.get("began_ns"), dict):
            continue
        taken.add(path.name)
        apart_ns = _apart_ns(known["began_ns"], host, began_ns)
        # Nodes whose launchers name no job have other ids, until the node that reports adds their
        # ranks to its dump.
        if apart_ns < _SAME_START_NS and (
            known.get("job") == marker["job"] or _has_added(folder, host, folders)
        ):
            of_run.append((apart_ns, path, known))
    if of_run:
        _, path, known = min(of_run, key=lambda each: each[0])
        marker |= {"job": known.get("job"), "began_ns": {**known["began_ns"], host: began_ns}}
        return path, marker
    names = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return dump_root / next(each for each in names if each not in taken), marker


def _marked_in(dump_root: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield each folder that commlens has made, with its descriptor and the content of its
    marker.
    """
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(dump_root.iterdir())
    for path in paths:
        with contextlib.suppress(OSError), opened_folder(path) as folder:
            if (marker := read_marker(folder)) is not None:
                yield path, folder, marker


def _apart_ns(starts: Mapping[str, Any], host: str, began_ns: int) -> int:
    """Return how far apart a run and the run of a dump began; ``_SAME_START_NS`` if they are two.

    Args:
        starts: by host, when the run of the dump began there.
        host: this one.
        began_ns: when the run began here.
    """
    if host in starts:  # this host wrote it, so it is exact
        return 0 if starts[host] == began_ns else _SAME_START_NS
    known = (abs(start - began_ns) for start in starts.values() if isinstance(start, int))
    return min(known, default=_SAME_START_NS)


def _has_added(folder: int, host: str, folders: Sequence[Path]) -> bool:
    """Return whether the node that reports has added this host's ranks to its dump."""
    before = _saved_before(folder, _observed_name(host))
    pids = {
        job_dirs.box_rank(box): job_dirs.box_pid(box)
        for each in folders
        for box in job_dirs.boxes(each)
    }
    return before.run is not None and bool(before.pids.items() & pids.items())


def save_dump(
    job_dir: Path,
    dump_root: Path,
    observations: Mapping[int, Observation],
    *,
    host: str,
    keep: int,
    mode: int = PRIVATE,
    folders: Sequence[Path] = (),
    health: NodeHealth | None = None,
) -> Path:
    """Copy a job's black boxes and the observations of their processes to ``<dump_root>/<name>/``,
    with :func:`dump_name`.

    A live box is copied as it is at that moment. Saving again overwrites the run's files of the
    same name. Each file appears whole or not at all. Only the newest ``keep`` folders made by
    commlens are kept.

    Args:
        job_dir: folder of the live boxes.
        dump_root: folder for all dumps; created if missing.
        observations: by global rank.
        host: this machine's name; on a shared file system, several machines save into one folder.
        keep: number of job folders to keep, including this one; at least 1.
        mode: permissions of the files; the folder is also searchable by all who may read it.
        folders: all folders of the job's live boxes, if there are several.
        health: the hardware of this machine.

    Returns:
        The job's folder.

    Raises:
        DumpError: nothing could be saved, or a file could not be written.
    """
    boxes = job_dirs.boxes(job_dir)
    if not boxes and not observations:
        raise DumpError(f"There are no black boxes in {job_dir} to save.")
    target, marker = _choose_target(dump_root, folders or [job_dir], host)
    own, copied = _observed_name(host), _Copied()
    with folder_to_fill(target, mode) as (folder, created, may_mark):
        try:
            if may_mark:
                copied.writing = MARKER
                write(folder, MARKER, _json({**marker, "saved_ns": time.time_ns()}), mode)
            before = _saved_before(folder, own)
            for path in boxes:
                copied.copy(path, folder, mode)
            copied.writing = own
            pids = {rank: status.pid for rank, status in copied.newest.items()}
            job, more = copied.job or job_dir.name, {}
            if before.run is not None and before.pids.items() & pids.items():
                job, more["restart"] = before.run  # as the node that reports has named them
            content = _observed(
                folder,
                host,
                job,
                {**before.saved, **copied.saved},
                observations,
                {**before.pids, **pids},
                copied.notes,
                health,
                **more,
            )
            write(folder, own, content, mode)
        except OSError as error:
            if created and not copied.saved:
                discard(target)
            raise DumpError(
                f"The dump in {target} is not complete: {copied.writing} could not be written"
                f" ({reason(error)}); {len(copied.saved)} of {len(boxes)} black boxes were saved."
                " Choose another folder with the setting dump_dir."
            ) from error
    if boxes and not copied.saved:
        raise DumpError(
            f"None of the {len(boxes)} black boxes in {job_dir} could be saved: {copied.notes[0]}"
        )
    _prune(dump_root, keep=max(keep, 1), current=target.name)
    return target


@dataclass
class _Copied:
    """The black boxes that were copied into a dump."""

    job: str = ""
    newest: dict[int, BoxStatus] = field(default_factory=dict)  # by rank
    saved: dict[str, int] = field(default_factory=dict)  # file name: Unix ns
    notes: list[str] = field(default_factory=list)  # why others were not, in sentences
    writing: str = ""  # the name of the last file

    def copy(self, path: Path, folder: int, mode: int) -> None:
        """Copy a live box as it is now. Raises OSError if that cannot be written."""
        self.writing = path.name
        size = path.lstat().st_size if path.exists() else 0
        if size > BOX_BYTES_MAX:
            self.notes.append(
                f"{path.name} was not saved: it has {size} bytes, more than the limit of"
                f" {BOX_BYTES_MAX}."
            )
            return
        try:
            with OpenBox(path) as box:
                status, content = box.status(), box.packed()
        except FormatError as error:
            self.notes.append(f"{path.name} was not saved: {error}")
            return
        write(folder, path.name, content, mode)
        _remove_partial(folder, path.name)
        self.saved[path.name] = time.time_ns()
        self.job = self.job or status.job
        known = self.newest.get(status.rank)
        if known is None or known.created_ns < status.created_ns:
            self.newest[status.rank] = status


class SavedRank(NamedTuple):
    """A rank of another node, for :func:`add_node`."""

    rank: int
    pid: int
    observation: Observation
    box: bytes  # packed; empty if there is none
    captured_ns: int  # Unix ns


def add_node(
    folder: Path,
    ranks: Sequence[SavedRank],
    *,
    host: str,
    job: str,
    restart: int = 0,
    mode: int = PRIVATE,
    health: NodeHealth | None = None,
) -> None:
    """Add the ranks of another node to a dump, as that node would save them.

    On a shared file system that node may save its ranks in the same dump at any time. A copy with
    only the newest records never replaces a whole one: it has a name of its own, and whoever finds
    both deletes it.

    Args:
        folder: of the dump.
        ranks: of the other node.
        host: its name.
        job: the name of the job in the dump: the boxes of the other node may have another one, if
            nothing names the job there.
        restart: likewise: torchelastic counts a restart only on the node whose workers failed.
        mode: the files' permissions.
        health: the hardware of that node.

    Raises:
        DumpError: one of the files could not be written.
    """
    try:
        with opened_folder(folder) as opened:
            times = dict(_saved_before(opened, _observed_name(host)).saved)
            for each in ranks:
                whole, partial = job_dirs.box_name(each.rank, each.pid), is_partial(each.box)
                is_older = partial or times.get(whole, 0) >= each.captured_ns
                has_better = exists(opened, whole) and is_older
                if each.box and not has_better:
                    name = _partial_name(whole) if partial else whole
                    write(opened, name, each.box, mode)
                    times[name] = each.captured_ns
                    _remove_partial(opened, whole)
            observations = {each.rank: each.observation for each in ranks}
            pids = {each.rank: each.pid for each in ranks}
            write(
                opened,
                _observed_name(host),
                _observed(
                    opened, host, job, times, observations, pids, [], health, restart=restart
                ),
                mode,
            )
    except OSError as error:
        raise DumpError(
            f"The ranks of {host} could not be added to the dump in {folder}: {reason(error)}."
        ) from error


def _partial_name(name: str) -> str:
    """Return the name of a copy with only the newest records of a box with this name."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.newest.{suffix}"


def _remove_partial(folder: int, name: str) -> None:
    """Delete the copy with only a box's newest records if there is a whole one."""
    if exists(folder, name):
        remove(folder, _partial_name(name))


def holds(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a dump has a whole copy of each of these black boxes."""
    try:
        with opened_folder(folder) as opened:
            return bool(names) and all(exists(opened, name) for name in names)
    except OSError:
        return False


def save_reports(
    folder: Path,
    *,
    host: str,
    page: bytes,
    verdict: bytes,
    for_all_nodes: bool = False,
    mode: int = PRIVATE,
) -> Path:
    """Save a verdict (JSON) and its page (HTML) beside a dump, and return the page's path:
    ``verdict.json`` and ``index.html``.

    If several nodes save into the folder and none reports for all of them, each has its own
    verdict, and the file names contain the host.

    Raises:
        DumpError: one of the files could not be written.
    """
    own = _observed_name(host)
    try:
        with opened_folder(folder) as opened:
            shared = not for_all_nodes and any(
                OBSERVED_NAME.fullmatch(name) and name != own for name in names_in(opened)
            )
            suffix = f"-{job_dirs.safe_name(host)}" if shared else ""
            write(opened, f"verdict{suffix}.json", verdict, mode)
            write(opened, f"index{suffix}.html", page, mode)
    except OSError as error:
        raise DumpError(
            f"The verdict could not be written beside the dump in {folder}: {reason(error)}."
        ) from error
    return folder / f"index{suffix}.html"


class EarlierVerdict(NamedTuple):
    """The verdict (JSON) on an earlier run of a program."""

    content: bytes
    lasted_ns: int  # from the start of that run until the verdict was saved


def earlier_verdicts(
    dump_root: Path, folders: Sequence[Path], before_ns: int
) -> list[EarlierVerdict]:
    """Return the verdicts on earlier runs of the same command by the same user, the newest first.

    Args:
        dump_root: holds the dumps.
        folders: of this run's black boxes.
        before_ns: when this run began (Unix ns): later verdicts are of other runs beside it.
    """
    program = _program(_statuses(folders))
    found: list[tuple[int, int, Path]] = []
    for path, opened, marker in _marked_in(dump_root) if program else ():
        saved, began = marker.get("saved_ns"), marker.get("started_ns")
        if not (isinstance(saved, int) and isinstance(began, int)):
            continue
        is_recent = before_ns - EARLIER_WITHIN_NS < saved < before_ns
        is_own = os.fstat(opened).st_uid == os.geteuid()
        if marker.get("program") == program and is_recent and is_own:
            found.append((saved, saved - began, path))
    verdicts = []
    for _, lasted_ns, path in sorted(found, reverse=True)[:EARLIER_MAX]:
        with contextlib.suppress(OSError), opened_folder(path) as opened:
            verdicts.append(EarlierVerdict(peek(opened, VERDICT, VERDICT_MAX) or b"", lasted_ns))
    return verdicts


def discard_job(job_dir: Path) -> None:
    """Delete a live job's black boxes, then its folder.

    Only files made by commlens are deleted; a folder with other files stays. Other processes may do
    the same concurrently.
    """
    discard(job_dir)


def _saved_before(folder: int, name: str) -> _Before:
    """Return what a host's earlier observed-*.json says.

    A job whose boxes are in several folders (because one was full) is saved in several calls.
    """
    try:
        before = msgspec.json.decode(
            peek(folder, name, OBSERVED_MAX) or b"", type=_SavedObservations
        )
    except (ValueError, RecursionError):
        return _Before()
    saved = {
        name: at_ns
        for name, at_ns in before.saved.items()
        if BOX_NAME.fullmatch(name) and exists(folder, name)
    }
    pids = {int(rank): entry.pid for rank, entry in before.ranks.items() if rank.isdecimal()}
    boxes = {rank: job_dirs.box_name(rank, pid) for rank, pid in pids.items()}
    kept = {
        rank: pid
        for rank, pid in pids.items()
        if saved.keys() & {boxes[rank], _partial_name(boxes[rank])}
    }
    return _Before(
        kept, saved, (before.job, before.restart) if before.restart is not None else None
    )


def _observed_name(host: str) -> str:
    """Return the name of the file with a host's observations."""
    return f"observed-{job_dirs.safe_name(host)}.json"


def _observed(
    folder: int,
    host: str,
    job: str,
    saved: Mapping[str, int],
    observations: Mapping[int, Observation],
    pids: Mapping[int, int],
    notes: Sequence[str],
    health: NodeHealth | None,
    **more: int,
) -> bytes:
    """Return the content of the file with a host's observations.

    Args:
        folder: of the dump: files that are no longer there are left out.
        host: whose processes they are.
        job: the job's name in the dump.
        saved: by file name of a box, when it was copied, in Unix ns.
        observations: by rank.
        pids: of the ranks.
        notes: sentences about boxes that could not be saved.
        health: the host's hardware.
        more: ``restart``, if it holds for all the boxes.
    """
    ranks = {
        str(rank): {"pid": pids.get(rank, 0), **_known_fields(observation)}
        for rank, observation in sorted(observations.items())
    }
    there = {name: at_ns for name, at_ns in saved.items() if exists(folder, name)}
    about = {"schema": OBSERVED_SCHEMA, "host": host, "job": job, **more, "saved": there}
    hardware = {} if health is None else {"health": health}
    return _json({**about, "problems": notes, "ranks": ranks, **hardware})


def _known_fields(observation: Observation) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(observation)
    return {name: value for name, value in fields.items() if value is not None}


def _json(content: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _prune(dump_root: Path, *, keep: int, current: str) -> None:
    """Delete the oldest marked job folders beyond ``keep``. Undeletable ones stay."""
    marked: list[tuple[int, Path]] = []
    for path, _, marker in _marked_in(dump_root):
        saved_ns = marker.get("saved_ns")
        if path.name != current:
            marked.append((saved_ns if isinstance(saved_ns, int) else 0, path))
    for _, path in sorted(marked, reverse=True)[keep - 1 :]:
        discard(path)
