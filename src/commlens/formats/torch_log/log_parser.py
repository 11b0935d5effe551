"""Puts together what a log's lines say of each rank."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from typing import Any, Final

from commlens.formats.columns import DTYPES, STARTED, RankColumns, Status, stack_of
from commlens.formats.torch_log import lines as L
from commlens.model.collective import Channel, CollectiveArgs, ProcessGroup, TensorSpec
from commlens.model.ops import COALESCED, POINT_TO_POINT, watchdog_wire_op
from commlens.model.ranklog import End, Observation

_RANKS_MAX: Final = 100_000
_NOTES_MAX: Final = 20  # sentences for each rank
_FRAMES_MAX: Final = 400

_FRAME: Final = re.compile(r'\s+File "(?P<file>[^"]{1,4096})", line (?P<line>\d{1,9}), in (?P<function>.{1,400})')
_FAILED_FRAME: Final = re.compile(r"#(?P<place>\d{1,4}) (?P<function>.{1,400}) from (?P<file>.{1,4096}):(?P<line>\d{1,9})\s*$")
_RAISED: Final = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout)\b")
_NO_WORKER: Final = re.compile(r"ChildFailedError|SignalException|subprocess\.CalledProcessError")
_CUDA_ERROR: Final = re.compile(r"CUDA error: [^\n]{1,200}|CUDA out of memory[^\n]{0,160}")
_FATAL: Final = re.compile(r"Fatal Python error: [^\n]{1,160}")
_CANNOT_PLACE: Final = POINT_TO_POINT | {COALESCED}
"""Of these a line says neither the peer nor which count its number belongs to."""


@dataclass(slots=True)
class _Group:
    group: L.Group
    progress: L.Progress | None = None
    failed: dict[int, L.Timeout | None] = field(default_factory=dict)  # sequence number: what is known of it


@dataclass(slots=True)
class _Rank:
    """What is known of one speaker."""

    groups: dict[tuple[str, str], _Group] = field(default_factory=dict)
    heard: dict[tuple[int | None, int], L.Timeout] = field(default_factory=dict)  # timed out, the group not said yet
    moments: dict[int, int] = field(default_factory=dict)  # sequence number: Unix ns of its line
    stack: list[tuple[str, int, str]] = field(default_factory=list)  # of the failed collective, innermost first
    traceback: list[tuple[str, int, str]] | None = None  # being heard, outermost first
    exception: str = ""
    exception_frames: list[tuple[str, int, str]] = field(default_factory=list)
    observation: Observation = field(default_factory=Observation)
    host: str = ""
    last_ns: int = 0


class Teller:
    """Hears a log's lines in their order and tells what they say of each rank."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ranks: dict[int, _Rank] = {}
        self._world_size = 0
        self._global: dict[int, int] = {}  # torchrun's local ranks, or srun's tasks, by lines that have both
        self._only_local = False
        self._tracebacks: set[int] = set()  # ranks in the middle of one
        self._stack_of: int | None = None  # the rank whose failed collective's stack comes now
        self._child: dict[str, str] = {}  # of torchrun's summary

    @property
    def listening(self) -> bool:
        """Whether every line is wanted now: a traceback or a stack is under way."""
        return bool(self._tracebacks) or self._stack_of is not None

    def hear(self, line: str) -> None:
        """One line."""
        speaker = L.speaker_of(line)
        if speaker.rank is not None and speaker.local is not None:
            self._global[speaker.local] = speaker.rank
        group = L.group_of(speaker.text)
        rank = self._who(speaker, group)
        self._world_size = max(self._world_size, L.size_of(speaker.text))
        self._hear_child(speaker.text)
        if rank not in self._ranks and len(self._ranks) >= _RANKS_MAX:
            return
        about = self._ranks.setdefault(rank, _Rank())
        about.last_ns = L.moment_of(line) or about.last_ns
        self._hear_watchdog(rank, about, speaker.text, group)
        self._hear_python(rank, about, speaker.text)

    def _who(self, speaker: L.Speaker, group: L.Group | None) -> int:
        """The global rank of who speaks; -1 when the line does not say."""
        if speaker.rank is not None:
            return speaker.rank
        if group is not None and group.is_default:
            return group.rank
        if speaker.local is not None:
            if speaker.local not in self._global:
                self._only_local = True
            return self._global.get(speaker.local, speaker.local)
        return -1

    # --- torch's watchdog ---------------------------------------------------------------------------------------------

    def _hear_watchdog(self, rank: int, about: _Rank, text: str, group: L.Group | None) -> None:
        timeout, progress = L.timeouts_of(text), L.progress_of(text)
        if timeout is not None:
            about.heard[timeout.group_rank, timeout.number] = timeout
            about.moments.setdefault(timeout.number, L.moment_of(text))
        if group is not None and (timeout is not None or progress is not None):
            known = about.groups.setdefault((group.name, group.number if not group.name else ""), _Group(group))
            if progress is not None:
                known.progress = progress
                if progress.number is not None:
                    heard = about.heard.pop((group.rank, progress.number), None)
                    known.failed[progress.number] = heard or known.failed.get(progress.number)
            if timeout is not None:
                known.failed[timeout.number] = timeout
                about.heard.pop((timeout.group_rank, timeout.number), None)
        if "Stack trace of the failed collective" in text and "not found" not in text:
            self._stack_of, about.stack = rank, []
        elif self._stack_of is not None and rank in (self._stack_of, -1):  # its lines have no prefix
            self._hear_stack(text)
        found = _FATAL.search(text) or ("atchdog" in text and _CUDA_ERROR.search(text)) or None
        if found:
            about.exception, about.exception_frames = found[0], []

    def _hear_stack(self, text: str) -> None:
        """A line of the failed collective's stack, or what comes after it."""
        assert self._stack_of is not None
        found = _FAILED_FRAME.match(text)
        stack = self._ranks[self._stack_of].stack
        if found and len(stack) < _FRAMES_MAX:
            stack.append((found["file"], int(found["line"]), found["function"]))
        elif not found:
            self._stack_of = None

    # --- Python, torchrun ---------------------------------------------------------------------------------------------

    def _hear_python(self, rank: int, about: _Rank, text: str) -> None:
        if "Traceback (most recent call last):" in text:
            about.traceback = []
            self._tracebacks.add(rank)
            return
        if about.traceback is None:
            return
        found = _FRAME.match(text)
        if found:
            if len(about.traceback) < _FRAMES_MAX:
                about.traceback.append((found["file"], int(found["line"]), found["function"]))
        elif text and not text[0].isspace():
            if _RAISED.match(text) and not _NO_WORKER.search(text[:120]):
                about.exception, about.exception_frames = text[:1000], about.traceback[::-1]
            about.traceback = None
            self._tracebacks.discard(rank)

    def _hear_child(self, text: str) -> None:
        """Torchrun's summary: time, host, rank and exit status of each worker that failed, in this order."""
        child = L.child_of(text)
        if child is None:
            return
        if child.what in ("time", "host"):
            self._child[child.what] = child.value
        elif child.what == "rank":
            self._child["rank"] = child.value
        elif "rank" in self._child and len(self._ranks) < _RANKS_MAX:
            about = self._ranks.setdefault(int(self._child["rank"]), _Rank())
            about.host = self._child.get("host", "")
            code = int(child.value)
            about.observation = Observation(
                end=End.KILLED if code < 0 else End.FAILED,
                exit_code=code if code >= 0 else None,
                signal=_signal(-code) if code < 0 else None,
                ended_ns=L.unix_ns(self._child.get("time", "")),
            )
            self._child = {}

    # --- what it all says ---------------------------------------------------------------------------------------------

    def rows(self) -> list[RankColumns]:
        """What was heard, one for each rank that has something to say."""
        found = []
        for rank, about in sorted(self._ranks.items()):
            rows = self._rows(rank, about)
            if len(rows) or rows.status or rows.troubles or rows.exception or rows.observation.end is not End.UNKNOWN:
                found.append(rows)
        return found

    def _rows(self, rank: int, about: _Rank) -> RankColumns:
        rows = RankColumns(rank=max(rank, -1), world_size=self._world_size, host=about.host, source=self._source, origin="torch-log")
        rows.captured_ns = about.last_ns
        rows.exception = about.exception
        rows.exception_stack = stack_of(about.exception_frames)
        rows.observation = about.observation
        if self._only_local and rank >= 0:
            rows.problems.append("the log has the number of each process on its node only; it was taken for the rank")
        columns: dict[str, list[Any]] = {name: [] for name in DTYPES}
        for known in about.groups.values():
            self._add_group(rows, columns, known, about)
        for (group_rank, _), timeout in about.heard.items():
            who = f" on rank {group_rank} of it" if rank < 0 and group_rank is not None else ""
            rows.troubles.append(f"{_timed_out(timeout)}, in a process group that the log does not name{who}")
        del rows.troubles[_NOTES_MAX:]
        if about.stack and len(columns["sequence"]) == 1:
            rows.stacks = [stack_of(about.stack)]
            columns["stack"] = [0]
        rows.set_columns(columns)
        return rows

    def _add_group(self, rows: RankColumns, columns: dict[str, list[Any]], known: _Group, about: _Rank) -> None:
        group, progress = known.group, known.progress
        name = group.name or ("0" if group.is_default else "")
        timeouts = {number: timeout for number, timeout in sorted(known.failed.items()) if timeout is not None}
        for timeout in timeouts.values():
            if not name or watchdog_wire_op(timeout.op) in _CANNOT_PLACE:
                rows.troubles.append(f"{_timed_out(timeout)}{_in_words(group)}")
        if not name:  # the process's own number of a group: other ranks have others for it
            return
        channel = Channel(ProcessGroup(name=name, ranks=(), description=group.description, backend="nccl"), "cuda")
        rows.groups.append(channel)
        if progress is not None:
            rows.status[name] = _status(progress)
            rows.status_groups[name] = name
        for number, timeout in timeouts.items():
            if watchdog_wire_op(timeout.op) in _CANNOT_PLACE or (progress is not None and number <= progress.completed):
                continue
            if channel not in rows.channels:
                rows.channels.append(channel)
            rows.args.append(_asked(timeout))
            moment = about.moments.get(number, 0)
            values = {
                "channel": rows.channels.index(channel), "args_index": len(rows.args) - 1, "stack": -1, "sequence": number,
                "record_id": -1, "op_id": -1, "peer": -1, "duration_ns": -1, "timeout_ms": timeout.timeout_ms,
                "created_ns": moment - timeout.ran_ms * 1_000_000 if moment and timeout.ran_ms >= 0 else 0,
                "state": STARTED if progress is not None and progress.started >= number else 0,
            }  # fmt: skip
            for column, content in columns.items():
                content.append(values.get(column, 0))


def _asked(timeout: L.Timeout) -> CollectiveArgs:
    """What the watchdog says: the operation and how many elements, but neither shape nor dtype."""
    return CollectiveArgs(watchdog_wire_op(timeout.op), timeout.op, _elements(timeout.inputs), _elements(timeout.outputs))


def _elements(count: int | None) -> tuple[TensorSpec, ...]:
    return () if count is None else (TensorSpec((count,), "unknown", "cuda"),)


def _timed_out(timeout: L.Timeout) -> str:
    return f"{watchdog_wire_op(timeout.op)} #{timeout.number} timed out after {timeout.timeout_ms / 1000:g} s"


def _in_words(group: L.Group) -> str:
    if group.name:
        return f" in group {group.description or group.name}"
    named = f" ({group.description})" if group.description else ""
    return f" in the process's own group number {group.number}{named}, which other ranks may number otherwise"


def _status(progress: L.Progress) -> Status:
    return (progress.enqueued, progress.started, progress.completed)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
