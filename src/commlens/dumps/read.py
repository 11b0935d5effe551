"""Reads what there is of a job: black boxes and dumps, in any order and under any name.

Files are told by their content, since people rename, gather and mix them. Standard library and msgspec only: ``diagnose``
reads dumps on a laptop, and the watcher beside a training job.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.blackbox.reader import SIZE_MAX, BoxStatus, OpenBox, open_regular, read_box, read_status, reason
from commlens.dumps.sources.compression import is_packed
from commlens.dumps.sources.source import FilePart, Source
from commlens.errors import CommandError, FormatError
from commlens.model.ranklog import End, Observation, RankLog
from commlens.text import ranks_phrase

MARKER: Final = "commlens-dump.json"
"""Marks a job folder as made by us, and so as ours to prune."""
OBSERVED_SCHEMA: Final = "commlens.observed/1"
BOX_NAME: Final = re.compile(r"rank-?\d+\.\d+\.(box|new)")
"""Names of black boxes, finished or being made."""

REPORT_NAME: Final = re.compile(r"(index|verdict)(-[A-Za-z0-9._-]+)?\.(html|json)")
"""Names of the reports that are saved beside a dump."""

OBSERVED_MAX: Final = 32 << 20
"""Largest observed-*.json that is read, in bytes; a node's ranks with all their stacks take less than 2 MB."""

_FOREIGN_MAX: Final = 10  # sentences about files of other programs for each folder
_FIELDS: Final = {info.name: info.type for info in msgspec.structs.fields(Observation)}


@dataclass
class Evidence:
    """What could be read of one job."""

    logs: list[RankLog] = field(default_factory=list)  # by rank
    problems: list[str] = field(default_factory=list)  # what could not be read, in sentences that name the file
    job: str = ""
    other_jobs: list[str] = field(default_factory=list)  # jobs whose boxes were there too and were left out


@dataclass
class _Found:
    """One black box that could be read."""

    path: Path
    status: BoxStatus
    log: RankLog

    @property
    def process(self) -> tuple[int, int, int]:
        return (self.status.pid, self.status.start_ticks, self.status.created_ns)

    @property
    def last_sign_ns(self) -> int:
        last = self.log.collectives[-1] if self.log.collectives else None
        moments = (last.announced_ns, last.wait_began_ns, last.done_ns) if last else ()
        return max(self.status.created_ns, self.status.heartbeat_ns, *moments)

    @property
    def age(self) -> tuple[int, int, int, str]:
        """Sorts copies of one box: the one that knows most comes last."""
        return (self.status.issued, self.status.heartbeat_ns, len(self.log.collectives), str(self.path))


@dataclass
class _Observed:
    """One observed-*.json."""

    path: Path
    host: str
    job: str
    ranks: dict[int, tuple[int, Observation]]  # pid (0: not known) and what was seen
    saved: dict[str, int]  # file name of a box: Unix ns at which it was copied


def read_evidence(paths: Iterable[str | Path], *, job: str | None = None) -> Evidence:
    """Read everything that the paths name: black boxes, dumps, folders of them, in any order and under any name.

    A folder is read with the folders in it, one level deep. Logs of different jobs are never mixed: without ``job``, the job
    that a folder mostly holds is taken, and of several folders' jobs the one that was alive last.

    Args:
        paths: files and folders.
        job: read this job and no other.

    Raises:
        CommandError: a path does not exist.
    """
    problems: list[str] = []
    return evidence_of((Source(str(path), FilePart(str(path))) for path in _files(paths, problems)), problems, job=job)


def evidence_of(sources: Iterable[Source], problems: list[str], *, job: str | None = None) -> Evidence:
    """The same of files that have been found already: black boxes and what was observed, wherever they lie.

    Args:
        sources: in any order.
        problems: sentences about what could not be read so far; it takes more of them.
        job: read this job and no other.
    """
    boxes: list[_Found] = []
    observed: list[_Observed] = []
    for source in sources:
        try:
            read = _read_file(source, problems)
        except FormatError as error:
            problems.append(str(error))
            continue
        if isinstance(read, _Found):
            boxes.append(read)
        elif read is not None:
            observed.append(read)
    names = sorted({found.log.job for found in boxes})
    chosen = job if job is not None else _choose_job(boxes) if boxes else max((one.job for one in observed), default="")
    if job is not None and job not in names:
        problems.append(f"There is no black box of job {job} here" + (f", only of {', '.join(names[:5])}." if names else "."))
    for name in names:
        if name != chosen:
            left = [found.path for found in boxes if found.log.job == name]
            problems.append(_left_out(left, f"another job ({name or 'without a name'}, not {chosen})"))
    mine = _one_per_rank([found for found in boxes if found.log.job == chosen], problems)
    seen = [one for one in observed if one.job == chosen]
    _join(mine, seen)
    logs = [found.log for found in mine] + _without_box(mine, seen, chosen, problems)
    return Evidence(sorted(logs, key=lambda log: log.rank), problems, chosen, [name for name in names if name != chosen])


def _files(paths: Iterable[str | Path], problems: list[str]) -> Iterator[Path]:
    """The regular files that the paths name, each once, in an order that does not depend on theirs."""
    files: set[Path] = set()
    folders: set[Path] = set()
    for path in sorted(set(map(Path, paths))):
        try:
            mode = path.stat().st_mode
        except PermissionError as error:
            problems.append(f"{path} could not be opened: {reason(error)}.")
            continue
        except (OSError, ValueError) as error:
            raise CommandError(f"{path} cannot be read ({reason(error)}). Give dump folders or black boxes (rank*.box).") from error
        (folders if stat.S_ISDIR(mode) else files).add(path)
    for folder in sorted(folders):
        files.update(_folder_files(folder, problems, deeper=True))
    seen: set[tuple[int, int]] = set()
    for path in sorted(files):
        try:
            status = path.stat()
        except OSError as error:
            problems.append(f"{path} could not be opened: {reason(error)}.")
            continue
        if (status.st_dev, status.st_ino) not in seen:  # the same file may be named twice: by a link, or with its folder
            seen.add((status.st_dev, status.st_ino))
            yield path


def _folder_files(folder: Path, problems: list[str], *, deeper: bool) -> list[Path]:
    files: list[Path] = []
    foreign: list[str] = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        problems.append(f"{folder} could not be listed: {reason(error)}.")
        return files
    for entry in entries:
        path = Path(entry.path)
        try:
            if entry.is_dir(follow_symlinks=False):
                files += _folder_files(path, problems, deeper=False) if deeper else []
            elif entry.name == MARKER or entry.name.startswith(".") or REPORT_NAME.fullmatch(entry.name):
                continue
            elif not entry.is_file():
                kind = "a link to a folder" if entry.is_dir() else "a link to nothing" if entry.is_symlink() else "not a regular file"
                foreign.append(f"{path} is {kind} and is left out.")
            elif _looks_like_ours(path):
                files.append(path)
            else:
                foreign.append(f"{path} is empty." if not entry.stat().st_size else f"{path} is neither a black box nor part of a dump.")
        except OSError as error:
            problems.append(f"{path} could not be opened: {reason(error)}.")
        except FormatError as error:
            problems.append(str(error))
    if not deeper and not files:  # a folder that has nothing to do with us: what lies in it is no news
        foreign = [text for text in foreign if L.SUFFIX in text]
    problems += foreign[:_FOREIGN_MAX]
    if len(foreign) > _FOREIGN_MAX:
        problems.append(f"{len(foreign) - _FOREIGN_MAX} more files in {folder} are not part of a dump.")
    return files


def _head(path: Path, length: int = len(L.MAGIC)) -> bytes:
    descriptor = open_regular(path, str(path))
    try:
        return os.pread(descriptor, length, 0)
    except OSError as error:
        raise FormatError(f"{path} could not be read: {reason(error)}.") from error
    finally:
        os.close(descriptor)


def _looks_like_ours(path: Path) -> bool:
    """Whether it is worth reading: our magic or a part of it, a name of ours, or perhaps JSON."""
    head = _head(path)
    return bool(head) and (head == L.MAGIC[: len(head)] or head.lstrip()[:1] == b"{" or bool(BOX_NAME.fullmatch(path.name)))


def _read_file(source: Source, problems: list[str]) -> _Found | _Observed | None:
    path = source.path
    if source.head(1 << 9).lstrip()[:1] == b"{":
        return _read_observed(source, problems)
    if path is not None and (_head(path) == L.MAGIC or not is_packed(_head(path))):
        with OpenBox(path, name=source.name) as box:
            status, log = box.status(), box.log()
    else:
        path = Path(source.name)
        content = source.read(SIZE_MAX)
        status, log = read_status(content, name=source.name), read_box(content, name=source.name)
        log.problems += source.problems
    if log.rank < 0:
        raise FormatError(f"{source.name} is of a process (pid {log.pid}) that never learnt its rank, so it is left out.")
    return _Found(path, status, log)


def _read_observed(source: Source, problems: list[str]) -> _Observed:
    path = source.path or Path(source.name)
    foreign = FormatError(f"{source.name} is neither a black box nor part of a dump.")
    content = source.read(OBSERVED_MAX + 1)
    if len(content) > OBSERVED_MAX:
        raise foreign
    try:
        whole = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        if OBSERVED_SCHEMA.encode() in content[:4096]:
            raise FormatError(f"{source.name} is damaged: it is not valid JSON.") from None
        raise foreign from None
    if not isinstance(whole, dict) or not isinstance(whole.get("schema"), str):
        raise foreign
    if whole["schema"] != OBSERVED_SCHEMA:
        if not whole["schema"].startswith("commlens.observed/"):
            raise foreign
        raise FormatError(f"{source.name} follows {whole['schema'][:60]}, and this commlens reads {OBSERVED_SCHEMA}.")
    damaged = False
    ranks: dict[int, tuple[int, Observation]] = {}
    entries = whole.get("ranks")
    for key, entry in (entries if isinstance(entries, dict) else {}).items():
        if not (isinstance(entry, dict) and key.isascii() and key.isdigit() and len(key) <= 9):
            damaged = True
            continue
        observation, whole_entry = _observation(entry)
        damaged = damaged or not whole_entry
        pid = entry.get("pid")
        ranks[int(key)] = (pid if isinstance(pid, int) and pid > 0 else 0, observation)
    saved = whole.get("saved")
    moments = {
        name: moment
        for name, moment in (saved if isinstance(saved, dict) else {}).items()
        if isinstance(moment, int) and 0 < moment < 1 << 63
    }
    notes = whole.get("problems")
    problems += [note for note in (notes if isinstance(notes, list) else [])[:100] if isinstance(note, str)]
    if damaged or not isinstance(entries, dict):
        problems.append(f"{source.name} is damaged in parts: what was seen of some processes is not known.")
    host, job = whole.get("host"), whole.get("job")
    return _Observed(path, host if isinstance(host, str) else "", job if isinstance(job, str) else "", ranks, moments)


def _observation(entry: dict[str, Any]) -> tuple[Observation, bool]:
    """An Observation from JSON, and whether all of it was right. What is wrong stays unknown."""
    fields: dict[str, Any] = {}
    good = True
    for name, type_ in _FIELDS.items():
        if name not in entry:
            continue
        try:
            value = msgspec.convert(entry[name], type_)
            msgspec.json.encode(value)  # refuses integers beyond 64 bits, which would break the report later
        except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
            good = False
        else:
            fields[name] = value
    return Observation(**fields), good


def _choose_job(boxes: list[_Found]) -> str:
    """The job to speak of: what its folder mostly holds; among several such, the one that was alive last."""
    folders: dict[Path, Counter[str]] = defaultdict(Counter)
    last: dict[str, int] = {}
    for found in boxes:
        folders[found.path.parent][found.log.job] += 1
        last[found.log.job] = max(last.get(found.log.job, 0), found.last_sign_ns)
    at_home: set[str] = set()
    for jobs in folders.values():
        most = max(jobs.values())
        at_home.update(name for name, count in jobs.items() if count == most)
    return max(at_home, key=lambda name: (last[name], name), default="")


def _one_per_rank(boxes: list[_Found], problems: list[str]) -> list[_Found]:
    """Leave one box for each rank: of the job's last restart, of its newest process, the copy that knows most."""
    restart = max((found.log.restart for found in boxes), default=0)
    earlier = [found for found in boxes if found.log.restart < restart]
    if earlier:
        problems.append(_left_out([found.path for found in earlier], f"runs before restart {restart} of the job"))
    ranks: dict[int, list[_Found]] = defaultdict(list)
    for found in boxes:
        if found.log.restart == restart:
            ranks[found.log.rank].append(found)
    kept: list[_Found] = []
    for rank, several in sorted(ranks.items()):
        best = max(several, key=lambda found: (found.status.created_ns, found.process, found.age))
        kept.append(best)
        for other in sorted(several, key=lambda found: str(found.path)):
            if other is not best:
                same = other.process == best.process
                what = "is another copy of the black box" if same else f"is of another process (pid {other.log.pid}) of rank {rank} than"
                problems.append(f"{other.path} {what} {best.path}, and is left out.")
    return kept


def _join(boxes: list[_Found], observed: list[_Observed]) -> None:
    """Add what was observed, and date each log: when it was copied, or now if the process lives, or its job's last sign."""
    last_sign: dict[Path, int] = defaultdict(int)
    for found in boxes:
        last_sign[found.path.parent] = max(last_sign[found.path.parent], found.last_sign_ns)
    for found in boxes:
        best: tuple[int, str] | None = None
        copied_ns = 0
        for one in observed:
            pid, observation = one.ranks.get(found.log.rank, (0, None))
            weight = (observation.seen_ns, str(one.path)) if observation is not None else (0, "")
            if observation is not None and pid in (0, found.log.pid) and (best is None or weight > best):
                best = weight
                found.log.observation = observation
            if one.path.parent == found.path.parent:
                copied_ns = max(copied_ns, one.saved.get(found.path.name, 0))
        if copied_ns:
            found.log.captured_ns = copied_ns
        elif not (_runs_here(found.status) and found.path.resolve().parent.parent.name.startswith("commlens-")):
            found.log.captured_ns = max(last_sign[found.path.parent], found.log.observation.seen_ns)


def _without_box(boxes: list[_Found], observed: list[_Observed], job: str, problems: list[str]) -> list[RankLog]:
    """Ranks that were seen to end and left no box: a process that dies before ``init_process_group`` is evidence too."""
    have = {found.log.rank for found in boxes}
    world_size = max((found.log.world_size for found in boxes), default=0)
    logs: dict[int, RankLog] = {}
    for one in sorted(observed, key=lambda one: str(one.path)):
        for rank, (pid, observation) in one.ranks.items():
            if rank in have or observation.end in (End.UNKNOWN, End.RUNNING, End.CLEAN):
                continue
            known = logs.get(rank)
            if known is None or known.observation.seen_ns < observation.seen_ns:
                logs[rank] = RankLog(
                    rank=rank,
                    world_size=world_size,
                    job=job,
                    host=one.host,
                    pid=pid,
                    captured_ns=observation.seen_ns or observation.ended_ns,
                    observation=observation,
                    source=str(one.path),
                    problems=["it left no black box"],
                )
    if logs:
        problems.append(f"There is no black box of {ranks_phrase(logs)}, only what was seen of the process from outside.")
    return list(logs.values())


def _runs_here(status: BoxStatus) -> bool:
    """Whether the box's process is one that runs on this machine now."""
    return (
        status.boot_id != ""
        and (status.boot_id, status.pid_namespace) == _here()
        and status.start_ticks == job_dirs.start_ticks(status.pid) != 0
    )


def _here() -> tuple[str, str]:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return boot_id, str(Path("/proc/self/ns/pid").readlink())
    except (OSError, ValueError):
        return "", ""


def _left_out(paths: list[Path], whose: str) -> str:
    boxes = f"1 black box of {whose} is" if len(paths) == 1 else f"{len(paths)} black boxes of {whose} are"
    return f"{boxes} left out: {_some(paths)}."


def _some(paths: Iterable[Path]) -> str:
    shown = sorted(str(path) for path in paths)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
