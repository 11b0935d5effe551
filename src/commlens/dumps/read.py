"""Read a job's black boxes and the observations of its processes, from files in any order and under
any name.

For example, of a dump that two nodes have written::

    rank0.4711.box  rank1.4712.box    black boxes of node n01
    observed-n01.json                 what its watcher saw of the processes: {"ranks": {"0": {"end":
                                      "killed", ...}}, "saved": {"rank0.4711.box": Unix ns}, ...}
    rank2.815.box  rank2.816.box      of node n02, whose rank 2 was started twice
    observed-n02.json

``read_evidence`` returns a :class:`~commlens.model.ranklog.RankLog` for each of ranks 0, 1 and 2,
with its observation; of rank 2, that of the newer process, and a sentence says which box is left
out.

Standard library and msgspec only: ``diagnose`` reads dumps on a laptop, and the watcher beside a
training job.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from commlens.blackbox import job_dirs
from commlens.blackbox.packed import is_packed, is_partial
from commlens.blackbox.reader import SIZE_MAX, BoxStatus, OpenBox, read_copy
from commlens.dumps.clocks import correct_clocks
from commlens.dumps.cores import Core, add_cores, read_core
from commlens.dumps.detect import CORE, OBSERVED, OBSERVED_MAX, OBSERVED_SCHEMA, Kind
from commlens.dumps.discover import discover
from commlens.dumps.sources import Source
from commlens.errors import CommlensError, FormatError
from commlens.model.grouping import grouped
from commlens.model.health import NodeHealth
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.store_identity import joined_runs
from commlens.model.verdict import Verdict
from commlens.text import clean_all, printable, ranks_phrase

_JOBS_NAMED: Final = 20
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


@dataclass
class JobLogs:
    """The readable logs of one job."""

    logs: list[RankLog] = field(default_factory=list)  # by rank
    problems: list[str] = field(default_factory=list)  # sentences about unreadable files
    job: str = ""
    # jobs whose boxes were found too and are left out
    other_jobs: list[str] = field(default_factory=list)
    unread: int = 0  # black boxes that could not be read
    # by rank, the stacks in core files of processes without a log
    cores: dict[int, Observation] = field(default_factory=dict)


@dataclass
class _Box:
    """A black box that could be read."""

    path: Path
    status: BoxStatus
    log: RankLog
    partial: bool = False  # a copy with only the newest records

    @property
    def process(self) -> tuple[int, int, int]:
        return (self.status.pid, self.status.start_ticks, self.status.created_ns)

    @property
    def last_sign_ns(self) -> int:
        last = self.log.collectives[-1] if self.log.collectives else None
        moments = (last.announced_ns, last.wait_began_ns, last.done_ns) if last else ()
        return max(self.status.created_ns, self.status.heartbeat_ns, *moments)

    @property
    def age(self) -> tuple[bool, int, int, int, str]:
        """Sort key of copies of one box: the most complete copy is last."""
        return (
            not self.partial,
            self.status.issued,
            self.status.heartbeat_ns,
            len(self.log.collectives),
            str(self.path),
        )


@dataclass
class _Observed:
    """The observations of one node, from an ``observed-*.json``."""

    path: Path
    host: str
    job: str
    ranks: dict[int, tuple[int, Observation]]  # pid (0 if unknown) and observation
    saved: dict[str, int]  # file name of a box: Unix ns of the copy
    # the job's restart count for all its boxes; None: their own counts hold. torchelastic counts a
    # restart only on the node whose workers failed, so the watcher that reports names it for all.
    restart: int | None = None
    health: NodeHealth | None = None


def read_evidence(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, job: str | None = None
) -> JobLogs:
    """Read all black boxes and observations at the paths: dumps, files, folders, in any order and
    under any name.

    Logs of different jobs are never mixed, unless groups made by hand join them. Without ``job``,
    the job with the most boxes in a folder is read; if there are several folders, the one of their
    jobs that was alive last.
    """
    files = discover(paths, own_only=True)
    return read_own_files(files.own, files.problems, job=job)


def read_own_files(
    files: Iterable[tuple[Source, Kind]], problems: list[str], *, job: str | None = None
) -> JobLogs:
    """Read black boxes and observations that :func:`~commlens.dumps.discover.discover` has found,
    of one job.

    ``problems`` is extended by sentences about unreadable files, and becomes the result's.
    """
    boxes, observed, cores, unread = _read_files(files, problems)
    _name_as_dumped(boxes, observed)
    by_job = grouped((box.log.job, box) for box in boxes)
    chosen = _choose_job(boxes, observed) if job is None else job
    joined = {chosen}  # with the programs that share groups made by hand, as a trainer and servers
    if job is None and chosen in by_job:
        logs_of = {name: [box.log for box in of_job] for name, of_job in by_job.items()}
        joined = joined_runs(logs_of, chosen)
    others = sorted(by_job.keys() - joined)
    if job is not None and job not in by_job:
        only = f", only of {', '.join(others[:5])}" if others else ""
        problems.append(f"There is no black box of job {job} here{only}.")
    problems += _left_out_jobs(by_job, chosen, others)
    logs = []
    for name in sorted(joined):
        of_job = [one for one in observed if one.job == name]
        logs += _logs_of_job(name, by_job.get(name, []), of_job, problems)
    problems += correct_clocks(logs)
    return JobLogs(logs, problems, chosen, others, unread, add_cores(logs, cores, problems))


def _read_files(
    files: Iterable[tuple[Source, Kind]], problems: list[str]
) -> tuple[list[_Box], list[_Observed], list[tuple[str, Core]], int]:
    """Return what can be read, and the number of boxes that cannot."""
    boxes: list[_Box] = []
    observed: list[_Observed] = []
    cores: list[tuple[str, Core]] = []
    unread = 0
    for source, kind in files:
        try:
            if kind is OBSERVED:
                observed.append(_read_observed(source, problems))
            elif kind is CORE:
                cores.append((source.name, read_core(source)))
            else:
                boxes.append(_read_box(source))
        except FormatError as error:
            problems.append(str(error))
            unread += kind not in (OBSERVED, CORE)
    return boxes, observed, cores, unread


def _left_out_jobs(
    by_job: Mapping[str, Sequence[_Box]], chosen: str, others: Sequence[str]
) -> Iterator[str]:
    """Yield which jobs are left out, in sentences."""
    for name in others[:_JOBS_NAMED]:
        owner = f"another job ({name or 'without a name'}, not {chosen})"
        yield _left_out([box.path for box in by_job[name]], owner)
    if len(others) > _JOBS_NAMED:
        yield f"The black boxes of {len(others) - _JOBS_NAMED} more jobs are left out."


def _logs_of_job(
    job: str, boxes: list[_Box], observed: list[_Observed], problems: list[str]
) -> list[RankLog]:
    """Return the logs of one job by rank, with what was observed of its processes."""
    kept = _one_per_rank(boxes, problems)
    _add_observations(kept, observed)
    logs = [box.log for box in kept] + _logs_without_box(kept, observed, job, problems)
    logs.sort(key=lambda log: log.rank)
    # each node's newest health belongs to the first log of its ranks
    known = [(one.host, (one.health, one)) for one in observed if one.health is not None]
    for several in grouped(known).values():
        health, newest = max(several, key=lambda each: each[0].taken_ns)
        first = next((log for log in logs if log.rank in newest.ranks), None)
        if first is not None:
            first.health = health
    return logs


def _name_as_dumped(boxes: list[_Box], observed: list[_Observed]) -> None:
    """Give the boxes of all nodes the job's name and restart count in its dump."""
    for one in observed:
        if one.restart is not None:
            for box in boxes:
                if box.path.name in one.saved and box.path.parent == one.path.parent:
                    box.log.job, box.log.restart = one.job, one.restart


def _read_box(source: Source) -> _Box:
    """Read a box: a live one in place, and a packed copy, as dumps hold, from its content."""
    path, partial = source.plain_path, False
    if path is not None and not is_packed(source.beginning):
        with OpenBox(path, name=source.name) as box:
            status, log = box.status(), box.log()
    else:
        path = path or Path(source.name)
        content = source.read(SIZE_MAX)
        status, log = read_copy(content, name=source.name)
        log.problems += source.problems
        partial = is_partial(content)
    if log.rank < 0:
        raise FormatError(
            f"{source.name} is left out: its process (pid {log.pid}) never learned its rank."
        )
    return _Box(path, status, log, partial)


def read_verdict(source: Source) -> Verdict | None:
    """Return the verdict that was saved beside a dump; None if the file holds none."""
    try:
        content = source.read(OBSERVED_MAX + 1)
        whole = clean_all(msgspec.json.decode(content)) if len(content) <= OBSERVED_MAX else None
        return msgspec.convert(whole, Verdict)
    except (CommlensError, ValueError, RecursionError):
        return None


class _ObservedFile(msgspec.Struct):
    """The content of an observed-*.json."""

    host: str = ""
    job: str = ""
    restart: int | None = None
    ranks: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    problems: list[Any] = []
    health: NodeHealth | None = None


def _read_observed(source: Source, problems: list[str]) -> _Observed:
    """Read an ``observed-*.json``: of a damaged one, what is valid."""
    whole = _read_json(source)
    found, is_valid = _valid_fields(whole, _ObservedFile)
    ranks, are_valid = _valid_ranks(found.ranks)
    moments = {
        name: moment
        for name, moment in found.saved.items()
        if isinstance(moment, int) and 0 < moment < 1 << 63
    }
    problems += [note for note in found.problems[:100] if isinstance(note, str)]
    if not (is_valid and are_valid and "ranks" in whole):
        problems.append(
            f"{source.name} is partly damaged: the observations of some processes are lost."
        )
    path, restart = source.path or Path(source.name), found.restart
    restart = restart if restart is not None and 0 <= restart < 1 << 31 else None
    return _Observed(path, found.host, found.job, ranks, moments, restart, found.health)


def _valid_ranks(entries: Mapping[str, Any]) -> tuple[dict[int, tuple[int, Observation]], bool]:
    """Return pid and observation of each rank, and whether all of them are valid."""
    ranks: dict[int, tuple[int, Observation]] = {}
    are_valid = True
    for key, entry in entries.items():
        if not (isinstance(entry, dict) and key.isascii() and key.isdigit() and len(key) <= 9):
            are_valid = False
            continue
        observation, is_valid = _valid_fields(entry, Observation)
        are_valid = are_valid and is_valid
        pid = entry.get("pid")
        ranks[int(key)] = (pid if isinstance(pid, int) and pid > 0 else 0, observation)
    return ranks, are_valid


def _read_json(source: Source) -> dict[str, Any]:
    """Return the JSON object in a file of observations, of the version that is known here."""
    content = source.read(OBSERVED_MAX + 1)
    if len(content) > OBSERVED_MAX:
        raise FormatError(f"{source.name} is larger than {OBSERVED_MAX >> 20} MiB and is left out.")
    try:
        whole = clean_all(msgspec.json.decode(content))
    except (ValueError, RecursionError):
        raise FormatError(f"{source.name} is damaged: it is not valid JSON.") from None
    schema = whole.get("schema") if isinstance(whole, dict) else None
    if not isinstance(schema, str) or not schema.startswith("commlens.observed/"):
        raise FormatError(f"{source.name} is not a dump that commlens can read, and is left out.")
    if schema != OBSERVED_SCHEMA:
        raise FormatError(
            f"{source.name} follows {schema[:60]}, but this commlens reads {OBSERVED_SCHEMA}."
        )
    return cast("dict[str, Any]", whole)


def _valid_fields(entry: Mapping[str, Any], kind: type[_Struct]) -> tuple[_Struct, bool]:
    """Return a struct with those fields from JSON that are valid, and whether all of them are."""
    fields: dict[str, Any] = {}
    is_valid = True
    for name, type_ in _types_of(kind):
        if name not in entry:
            continue
        try:
            value = msgspec.convert(entry[name], type_)
            # rejects integers beyond 64 bits, which would break the report later
            msgspec.json.encode(value)
        except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
            is_valid = False
        else:
            fields[name] = value
    return kind(**fields), is_valid


@lru_cache
def _types_of(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(info.name, info.type) for info in msgspec.structs.fields(kind)]


def _choose_job(boxes: list[_Box], observed: list[_Observed]) -> str:
    """Return the job with the most boxes in its folder. Of several, because there are several
    folders or as many boxes of each, return the one that was alive last.
    """
    folders: dict[Path, Counter[str]] = defaultdict(Counter)
    last: dict[str, int] = {}
    for box in boxes:
        folders[box.path.parent][box.log.job] += 1
        last[box.log.job] = max(last.get(box.log.job, 0), box.last_sign_ns)
    main_jobs: set[str] = set()
    for jobs in folders.values():
        most = max(jobs.values())
        main_jobs.update(name for name, count in jobs.items() if count == most)
    if not boxes:
        return max((one.job for one in observed), default="")
    return max(main_jobs, key=lambda name: (last[name], name))


def _one_per_rank(boxes: list[_Box], problems: list[str]) -> list[_Box]:
    """Keep one box per rank: of the last restart, the newest process, the best copy."""
    restart = max((box.log.restart for box in boxes), default=0)
    earlier = [box.path for box in boxes if box.log.restart < restart]
    if earlier:
        problems.append(_left_out(earlier, f"runs before restart {restart} of the job"))
    ranks = grouped((box.log.rank, box) for box in boxes if box.log.restart == restart)
    kept: list[_Box] = []
    for rank, several in sorted(ranks.items()):
        best = max(several, key=lambda box: (box.status.created_ns, box.process, box.age))
        kept.append(best)
        for other in sorted(several, key=lambda box: str(box.path)):
            if other is not best:
                same = other.process == best.process
                relation = (
                    "another copy of the black box"
                    if same
                    else f"from another process (pid {other.log.pid}) of rank {rank} than"
                )
                problems.append(
                    f"{printable(str(other.path))} is left out: it is {relation}"
                    f" {printable(str(best.path))}."
                )
    return kept


def _add_observations(boxes: list[_Box], observed: list[_Observed]) -> None:
    """Add the observations, and date each log: its copy, now if the process runs, or its job's last
    sign of life.
    """
    last_sign: dict[Path, int] = defaultdict(int)
    for box in boxes:
        last_sign[box.path.parent] = max(last_sign[box.path.parent], box.last_sign_ns)
    for box in boxes:
        newest: tuple[int, str] | None = None
        copied_ns = 0
        for one in observed:
            pid, observation = one.ranks.get(box.log.rank, (0, None))
            if observation is not None and pid in (0, box.log.pid):
                seen = (observation.seen_ns, str(one.path))  # the path: of two, always the same one
                if newest is None or seen > newest:
                    newest, box.log.observation = seen, observation
            if one.path.parent == box.path.parent:
                copied_ns = max(copied_ns, one.saved.get(box.path.name, 0))
        if copied_ns:
            box.log.captured_ns = copied_ns
            continue
        # A live box, in the folder of a job in memory, is of now.
        is_in_memory = box.path.resolve().parent.parent.name.startswith("commlens-")
        if not (is_in_memory and _runs_here(box.status)):
            box.log.captured_ns = max(last_sign[box.path.parent], box.log.observation.seen_ns)


def _logs_without_box(
    boxes: list[_Box], observed: list[_Observed], job: str, problems: list[str]
) -> list[RankLog]:
    """Return logs of ranks that ended before ``init_process_group``."""
    have = {box.log.rank for box in boxes}
    world_size = max((box.log.world_size for box in boxes), default=0)
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
                    source=printable(str(one.path)),
                    problems=["it left no black box"],
                )
    if logs:
        problems.append(
            f"There is no black box of {ranks_phrase(logs)}, only outside observations of the"
            " process."
        )
    return list(logs.values())


def _runs_here(status: BoxStatus) -> bool:
    """Return whether the process of a box runs on this machine now."""
    here, start = job_dirs.this_machine(), job_dirs.start_ticks(status.pid)
    return (
        here != ("", "")
        and (status.boot_id, status.pid_namespace) == here
        and start != 0
        and status.start_ticks == start
    )


def _left_out(paths: Sequence[Path], owner: str) -> str:
    boxes = (
        f"1 black box of {owner} is"
        if len(paths) == 1
        else f"{len(paths)} black boxes of {owner} are"
    )
    named = sorted(printable(str(path)) for path in paths)
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f"{boxes} left out: {', '.join(named[:3])}{more}."
