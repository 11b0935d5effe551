"""Join a log's lines to one state per rank."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, Final

from commlens.formats.columns import (
    COMPLETED,
    DTYPES,
    SCHEDULED,
    STARTED,
    TEXT_LOG,
    EndingLine,
    RankColumns,
    stack_of,
)
from commlens.formats.torch_log import lines as L
from commlens.formats.torch_log.endings import (
    parse_ending,
    parse_failed_node,
    parse_rank_ending,
    parse_xid,
)
from commlens.formats.torch_log.nccl_lines import Communicator, NcclCall, NcclLines, NcclPlace
from commlens.model.cause import OF_THE_STORE
from commlens.model.collective import Channel, CollectiveArgs, ProcessGroup, TensorSpec
from commlens.model.device_assertion import ASSERTED, parse_device_assertion
from commlens.model.health import RankPlace
from commlens.model.ops import (
    COALESCED,
    POINT_TO_POINT,
    REDUCING,
    ROOTED,
    UNKNOWN_DTYPE,
    watchdog_wire_op,
)
from commlens.model.ranklog import CAUSED_BY, End, Observation
from commlens.model.topology import rail_of
from commlens.text import clean, count, signal_name

_RANKS_MAX: Final = 100_000
_NOTES_MAX: Final = 20  # sentences per rank
_STORE_LINES_MAX: Final = 6
_FRAMES_MAX: Final = 400
_UNREAD_MAX: Final = 200  # characters of a line that are quoted
_PARTS_MAX: Final = 6  # of a wrapped line

_FRAME: Final = re.compile(
    r'\s+File "(?P<file>[^"]{1,4096})", line (?P<line>\d{1,9}), in (?P<function>.{1,400})'
)
_FAILED_FRAME: Final = re.compile(
    r"#(?P<place>\d{1,4}) (?P<function>.{1,400}) from (?P<file>.{1,4096}):(?P<line>\d{1,9})\s*$"
)
_RAISED: Final = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|Iteration)\b"
)
_OF_RANK: Final = re.compile(r"\(RANK \d{1,7}\)")
# named by a launcher, or by vLLM's engine, because a worker ended
_NO_WORKER: Final = re.compile(
    r"ChildFailedError|SignalException|subprocess\.CalledProcessError"
    r"|Process(?:Exited|Raised)Exception|Engine core initialization failed"
)
# an exception of any name, as the last line of a traceback
_NAMED: Final = re.compile(r"[A-Za-z_][\w.]{0,200}(?::\s|$)")
# in torchrun's list of failed workers: the traceback of one that torchelastic's record() decorates
_IN_SUMMARY: Final = re.compile(r"\s+traceback : Traceback \(most recent call last\):")
_SUMMARY_INDENT: Final = "  "
# of torch.multiprocessing.spawn, before a traceback
_SPAWNED: Final = re.compile(r"-- Process (\d{1,7}) terminated with the following error:")
_CUDA_ERROR: Final = re.compile(r"CUDA error: [^\n]{1,200}|CUDA out of memory[^\n]{0,160}")
_NCCL_ERROR: Final = re.compile(r"NCCL error: [^\n]{1,200}")
# of torchrun, Accelerate and DeepSpeed
_LAUNCHER: Final = re.compile(
    r"(?:^|[/\\])(?:torchrun|accelerate|deepspeed)$"
    r"|torch/distributed/(?:run|launch|launcher/api)\.py$|accelerate/commands/launch\.py$"
    r"|torch/distributed/elastic/(?:agent|rendezvous)/"
)
# "The above exception was the direct cause of ..." or "During handling of the above exception, ..."
_CHAINED: Final = re.compile(r"^(?:The above exception was|During handling of the above exception)")
# it ends its rank, also where its traceback is left out
_BARE: Final = re.compile(r"torch\.distributed\.Dist\w{1,40}Error: ")
# an exception of NCCL, RCCL or HCCL, and the line after it that says what happened
_WITH_LAST_ERROR: Final = re.compile(
    r"[NRH]CCL (?:[Ee]rror|Async Error|function error)|NCCL \w{1,40} failed: "
)
_LAST_ERROR: Final = re.compile(
    r"\s*(?:NCCL )?Last [Ee]rror:(?P<nccl>.*)"
    r"|\s*E[A-Z]\d{4}: (?:\[PID: \d+\] )?(?:[\d:.-]{19,} +)?(?P<hccl>(?!Inner Error).*)"
)
_ERROR_LINES_MAX: Final = 4  # after an exception, up to that line
_CAUSE_MAX: Final = 500  # characters of an exception that caused another one
_FATAL: Final = re.compile(r"Fatal Python error: [^\n]{1,160}")
# of gloo, in C++
_UNCAUGHT: Final = re.compile(r"^\s*what\(\):\s+(?P<error>\[enforce fail at .{1,400})")
# of torch, in C++
_UNCAUGHT_CUDA: Final = re.compile(r"^\s*what\(\):\s+(?P<error>CUDA error: .{1,200})")
_UNKNOWN: Final = {"stack": -1, "record_id": -1, "op_id": -1, "peer": -1, "duration_ns": -1}
_GROUPS: Final = {"": "", "0": " of the default group"}  # of torch 2.15's backend
_CANNOT_PLACE: Final = POINT_TO_POINT | {COALESCED}
"""Ops whose log lines contain neither the peer nor the counter of the sequence number."""


@dataclass(slots=True)
class _Group:
    group: L.NamedGroup
    progress: L.Progress | None = None
    # sequence number: its timeout, if logged
    failed: dict[int, L.Timeout | None] = field(default_factory=dict)

    @property
    def timeouts(self) -> dict[int, L.Timeout]:
        """The timeouts that were logged, by sequence number, ascending."""
        return {
            number: timeout
            for number, timeout in sorted(self.failed.items())
            if timeout is not None
        }

    @property
    def sends_messages(self) -> bool:
        """Whether messages, which have a counter of their own, are seen to be among its work."""
        timed_out = any(
            watchdog_wire_op(timeout.op) in _CANNOT_PLACE for timeout in self.timeouts.values()
        )
        return timed_out or (
            self.progress is not None and self.progress.enqueued < self.progress.completed
        )


@dataclass(slots=True)
class _RankLines:
    columns: RankColumns  # the result, still without operations
    groups: dict[tuple[str, str], _Group] = field(default_factory=dict)
    # timed out in a group that is not yet known
    unassigned: dict[tuple[int | None, int], L.Timeout] = field(default_factory=dict)
    # of torch 2.15's backend, which names no collective: group name, milliseconds
    nccl2_timeouts: dict[str, int] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)  # sequence number: Unix ns of its line
    unread: int = 0  # lines of the watchdog whose form is not known
    first_unread: str = ""
    # of the failed collective, innermost first
    stack: list[tuple[str, int, str]] = field(default_factory=list)
    traceback: list[tuple[str, int, str]] | None = None  # being read, outermost first
    # the rank whose traceback, inside of the exception of another one, is being read
    inner: str = ""
    chained: bool = False  # the next exception is one that the last one caused
    exception_frames: list[tuple[str, int, str]] = field(default_factory=list)

    def add_place(self, rank: int, told: NcclPlace) -> None:
        """Add the rank's place, from NCCL's lines."""
        self.columns.host = self.columns.host or told.host
        self.columns.place = RankPlace(
            rank, gpu_index=told.gpu, nic=told.nic, rail=rail_of(told.nic, told.nics)
        )


class LogParser:
    """Reads a log's lines in order and collects the state of each rank."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ranks: dict[int, _RankLines] = {}
        self._world_size = 0
        # global rank by torchrun's local rank or srun's task, from lines with both
        self._global: dict[int, int] = {}
        self._only_local = False
        self._remarks: list[tuple[str, int]] = []
        self._nccl = NcclLines()
        self._communicators: list[Communicator] = []
        self._launcher_signal = ""
        self._endings: list[EndingLine] = []
        self._store_lines: list[EndingLine] = []  # the newest: a store is tried again and again
        # ranks of which NCCL's last error may follow, in so many lines; 0: in the next one
        self._awaited: dict[int, int] = {}
        self._is_of_a_job = False  # a line is of a distributed job
        self._cut: list[str] = []  # the parts of a wrapped line, so far
        self._tracebacks: set[int] = set()  # ranks inside a traceback
        # the rank of the process whose traceback spawn() prints next, or torchrun in its list
        self._spawned = -1
        self._indent = ""  # of the lines of that traceback
        self._last_worker = -1  # the last rank in torchrun's list
        self._stack_of: int | None = None  # the rank whose failed collective's stack is being read
        self._worker: dict[str, str] = {}  # fields of a worker in torchrun's summary
        self._pids: dict[int, str] = {}  # of the workers in it, by rank

    @property
    def in_block(self) -> bool:
        """Whether a traceback or a stack is being read, so that every line matters."""
        return bool(self._tracebacks or self._awaited or self._stack_of is not None or self._cut)

    def add_mention(self, rank: int) -> None:
        """Note a rank whose line says nothing else."""
        if len(self._ranks) < _RANKS_MAX:
            self._about(rank)
        # torch knows the rank: its store was reached
        self._store_lines = []

    def _about(self, rank: int) -> _RankLines:
        """Return the state of a rank, also of one that no line has told of."""
        if rank not in self._ranks:
            self._ranks[rank] = _RankLines(RankColumns(source=self._source, origin=TEXT_LOG))
        return self._ranks[rank]

    def add_line(self, line: str) -> None:
        """Parse one line. If it continues the message of the line before, join it to that line."""
        if self._cut and self._joins(line):
            return
        self._flush()
        if L.may_go_on(line):
            self._cut = [line]
        else:
            self._add_whole_line(line)

    def _joins(self, line: str) -> bool:
        """Join a line to the parts of a wrapped one, and parse that once it is whole. Return False
        if the line cannot be one of them.
        """
        if L.begins_message(line) or len(self._cut) >= _PARTS_MAX:
            return False
        self._cut.append(L.parse_origin(line).line)
        for joined in ("".join(self._cut), " ".join(part.strip() for part in self._cut)):
            if L.is_whole(joined):
                self._cut = []
                self._add_whole_line(joined)
                break
        return True

    def _flush(self) -> None:
        """Parse each line on its own of a message whose end has not come."""
        parts, self._cut = self._cut, []
        for part in parts:
            self._add_whole_line(part)

    def _add_whole_line(self, line: str) -> None:
        origin = L.parse_origin(line)
        if origin.rank is not None and origin.local is not None:
            self._global[origin.local] = origin.rank
        group = L.parse_group(origin.line)
        rank = self._rank_of(origin, group)
        self._nccl.add(origin.line, rank)
        self._remarks += L.parse_remarks(origin.line)[: _NOTES_MAX - len(self._remarks)]
        self._launcher_signal = L.parse_launcher_signal(origin.line) or self._launcher_signal
        self._add_ending(origin.line, rank)
        self._is_of_a_job = self._is_of_a_job or L.is_of_a_job(origin.line)
        self._world_size = max(self._world_size, L.number_in(L.WORLD_SIZE, origin.line))
        self._add_worker_field(origin.line)
        self._add_rank_ending(origin.line)
        if found := _SPAWNED.search(origin.line):
            self._spawned, self._only_local = int(found[1]), True
        text = origin.line
        if _IN_SUMMARY.match(text):
            self._spawned, self._indent = self._last_worker, _SUMMARY_INDENT
        if rank < 0 <= self._spawned:
            rank, text = self._spawned, text.removeprefix(self._indent)
        if rank not in self._ranks and len(self._ranks) >= _RANKS_MAX:
            return
        about = self._about(rank)
        about.columns.captured_ns = L.parse_time(line) or about.columns.captured_ns
        self._add_last_error(rank, text)
        self._add_watchdog_line(rank, about, text, group)
        self._add_python_line(rank, about, text)

    def _add_ending(self, text: str, rank: int) -> None:
        ending = parse_ending(text)
        if ending in OF_THE_STORE:
            quoted = shorten(L.without_head(text), _UNREAD_MAX, placeholder=" ...")
            told = EndingLine(ending, quoted, rank=rank, listens="server socket" in text)
            others = [line for line in self._store_lines if line != told]
            self._store_lines = [*others, told][-_STORE_LINES_MAX:]
        elif ending is not None and len(self._endings) < _NOTES_MAX:
            quoted = shorten(text, _UNREAD_MAX, placeholder=" ...")
            raised = any(about.columns.exception for about in self._ranks.values())
            xid, node = parse_xid(text), parse_failed_node(text)
            self._endings.append(
                EndingLine(ending, quoted, xid, node=node, before_errors=not raised)
            )

    def _rank_of(self, origin: L.Origin, group: L.NamedGroup | None) -> int:
        """Return the global rank that wrote a line; -1 if unknown."""
        if origin.rank is not None:
            return origin.rank
        if group is not None and group.is_default:
            return group.rank
        if origin.local is not None:
            if origin.local not in self._global:
                self._only_local = True
            return self._global.get(origin.local, origin.local)
        return -1

    # --- torch's watchdog

    def _add_watchdog_line(
        self, rank: int, about: _RankLines, text: str, group: L.NamedGroup | None
    ) -> None:
        timeout = L.parse_timeout(text)
        _add_work(about, text, group, timeout)
        if (limit := L.parse_nccl2_timeout(text)) is not None:
            about.columns.timed_out = True
            where = group.name if group is not None else ""
            about.nccl2_timeouts[where] = limit or about.nccl2_timeouts.get(where, 0)
        if L.is_unread(text):
            about.unread += 1
            about.first_unread = about.first_unread or L.without_head(text)
        about.columns.stuck_watchdog_s = max(
            about.columns.stuck_watchdog_s, L.number_in(L.STUCK_WATCHDOG, text)
        )
        if "Stack trace of the failed collective" in text and "not found" not in text:
            self._stack_of, about.stack = rank, []
        elif self._stack_of is not None and rank in (self._stack_of, -1):
            # its lines have no prefix
            self._add_stack_line(text)
        about.columns.device_assertion = about.columns.device_assertion or clean(
            parse_device_assertion(text)
        )
        self._add_error(rank, about, text, failed=timeout is not None and timeout.has_failed)

    def _add_error(self, rank: int, about: _RankLines, text: str, *, failed: bool) -> None:
        """Set the exception that C++ or the watchdog reports; ``failed``: of a collective."""
        if uncaught := _UNCAUGHT.match(text):
            about.columns.exception = f"RuntimeError: {uncaught['error']}"
            about.exception_frames = []
        elif not about.columns.exception and (uncaught := _UNCAUGHT_CUDA.match(text)):
            about.columns.exception = uncaught["error"]
        found = _FATAL.search(text)
        if found is None and ("atchdog" in text or (failed and not about.columns.exception)):
            found = _CUDA_ERROR.search(text) or _NCCL_ERROR.search(text)
        if found:
            self._set_exception(rank, about, found[0], [])

    def _add_stack_line(self, text: str) -> None:
        """Parse a line of the failed collective's stack, or the line after it."""
        assert self._stack_of is not None
        found = _FAILED_FRAME.match(text)
        stack = self._ranks[self._stack_of].stack
        if found and len(stack) < _FRAMES_MAX:
            stack.append((found["file"], int(found["line"]), found["function"]))
        elif not found:
            self._stack_of = None

    def _set_exception(
        self, rank: int, about: _RankLines, text: str, frames: list[tuple[str, int, str]]
    ) -> None:
        """Set a rank's exception, and the exception that caused it if a line names one."""
        cause = about.columns.exception if about.chained else ""
        by_launcher = any(_LAUNCHER.search(file) for file, _, _ in frames)
        if by_launcher and about.columns.exception and not about.columns.by_launcher:
            return  # it ends because a worker raised one
        about.columns.exception, about.exception_frames, about.chained = text[:1000], frames, False
        about.columns.by_launcher = by_launcher
        if cause:
            about.columns.exception += f"{CAUSED_BY}{cause[:_CAUSE_MAX]}"
        if _WITH_LAST_ERROR.search(text):
            self._awaited[rank] = _ERROR_LINES_MAX

    def _add_last_error(self, rank: int, text: str) -> None:
        """Add a library's last error to the exception before it: it says what happened."""
        if not self._awaited:
            return
        of = rank if rank in self._awaited else next(reversed(self._awaited))
        if rank not in (of, -1):
            return
        found = _LAST_ERROR.match(text) if self._awaited[of] else None
        told = (found["nccl"] or found["hccl"] or "") if found else text * (not self._awaited[of])
        if told.strip():
            del self._awaited[of]
            self._ranks[of].columns.exception += f"\nLast error:\n{told.strip()[:_CAUSE_MAX]}"
        elif found:
            self._awaited[of] = 0
        else:
            self._awaited[of] -= 1
            if self._awaited[of] <= 0:
                del self._awaited[of]

    # --- Python, torchrun

    def _add_python_line(self, rank: int, about: _RankLines, text: str) -> None:
        if "Traceback (most recent call last):" in text:
            of_rank = _OF_RANK.search(text)
            about.inner = (
                f" {of_rank[0]}" if of_rank is not None and about.columns.exception else ""
            )
            about.traceback = []
            self._tracebacks.add(rank)
            return
        if about.traceback is None:
            about.chained = about.chained or (
                bool(about.columns.exception) and _CHAINED.match(text) is not None
            )
            if not about.columns.exception and _BARE.match(text):
                self._set_exception(rank, about, text, [])
            return
        found = _FRAME.match(text)
        if found:
            if len(about.traceback) < _FRAMES_MAX:
                about.traceback.append((found["file"], int(found["line"]), found["function"]))
        elif text and not text[0].isspace():
            if about.inner:
                about.columns.exception = f"{about.columns.exception}{about.inner} {text[:500]}"
            elif _is_raised(rank, text, about.traceback):
                self._set_exception(rank, about, text, about.traceback[::-1])
            about.traceback = None
            self._spawned, self._indent = -1, ""
            self._tracebacks.discard(rank)

    def _add_rank_ending(self, text: str) -> None:
        """Add how a rank ended according to mpirun or Lightning."""
        ending = parse_rank_ending(text)
        if ending is None or len(self._ranks) >= _RANKS_MAX:
            return
        rank = self._global.get(ending.rank, ending.rank) if ending.is_local else ending.rank
        self._only_local = self._only_local or (ending.is_local and not self._global)
        about = self._about(rank)
        about.columns.host = ending.host or about.columns.host
        about.columns.observation = _observed(ending.code)

    def _add_worker_field(self, text: str) -> None:
        """Parse torchrun's summary: time, host, rank and exit status of each failed worker, in this
        order.
        """
        self._worker |= L.parse_worker_field(text)
        if "exit" not in self._worker:
            return
        worker, self._worker = self._worker, {}
        if "rank" in worker and len(self._ranks) < _RANKS_MAX:
            self._last_worker = int(worker["rank"])
            about = self._about(self._last_worker)
            about.columns.host = worker.get("host", "")
            ended_ns = L.parse_torchrun_time(worker.get("time", ""))
            about.columns.observation = _observed(int(worker["exit"]), ended_ns)
            self._pids[self._last_worker] = worker["pid"]

    # --- the result

    def columns(self) -> list[RankColumns]:
        """Return the columns of each rank that a line names, even if the line says nothing else
        about it; of no rank (-1) if there is none.
        """
        self._flush()
        self._split_by_group_rank()
        self._forget_mixed_counters()
        self._add_nccl_ranks()
        self._place_unnamed_errors()
        found = [self._columns_of(rank, about) for rank, about in sorted(self._ranks.items())]
        told = [
            one
            for one in found
            if one.rank >= 0
            or one.timeouts
            or one.exception
            or one.stuck_watchdog_s
            or one.lost_entries
        ]
        told = told or [one for one in found if one.launcher_signal or one.endings or one.remarks]
        return told or found[: self._is_of_a_job]

    def _add_nccl_ranks(self) -> None:
        """Add the ranks that NCCL's own lines name, and the ops that they issued."""
        self._world_size = max(self._world_size, self._nccl.world_size())
        for rank, pid in self._pids.items():
            self._nccl.tell_rank(pid, rank)
        self._match_last_errors()
        for process, rank in self._nccl.ranks().items():
            self.add_mention(rank)
            if rank in self._ranks and "CCL" in self._ranks[rank].columns.exception:
                self._ranks[rank].columns.warnings += self._nccl.warnings.get(process, ())
                self._ranks[rank].columns.host = self._ranks[rank].columns.host or process[0]
        for rank, place in self._nccl.places().items():
            self._ranks[rank].add_place(rank, place)
        self._communicators = self._nccl.communicators()

    def _match_last_errors(self) -> None:
        """Find the ranks of processes by a warning that is the last error of one rank alone."""
        said: dict[str, set[str]] = defaultdict(set)
        for (_, pid), warnings in self._nccl.warnings.items():
            for warning in warnings:
                said[warning.partition("NCCL WARN ")[2].strip()].add(pid)
        raised: dict[str, set[int]] = defaultdict(set)
        for rank, about in self._ranks.items():
            raised[about.columns.exception.partition("\nLast error:\n")[2]].add(rank)
        for text, pids in said.items():
            ranks = raised.get(text, set())
            if len(pids) == 1 == len(ranks):
                self._nccl.tell_rank(pids.pop(), min(ranks))

    def _place_unnamed_errors(self) -> None:
        """Give what C++ and the device print without a rank to the rank whose exception is of the
        same error: Python prints that once more, with the rank.
        """
        if (unnamed := self._ranks.get(-1)) is not None:
            _share_out(unnamed, [about for rank, about in self._ranks.items() if rank >= 0])
        for about in self._ranks.values():
            if about.columns.device_assertion and not about.columns.exception:
                about.columns.exception = f"CUDA error: {ASSERTED} triggered"

    def _forget_mixed_counters(self) -> None:
        """Forget the progress of groups that send messages: the counter is that of messages or of
        collectives, whichever was last.
        """
        groups = [group for about in self._ranks.values() for group in about.groups.values()]
        mixed = {one.group.name for one in groups if one.sends_messages}
        for one in groups:
            if one.group.name in mixed:
                one.progress = None

    def _split_by_group_rank(self) -> None:
        """Tell ranks apart by their rank in a group that is not named, if nothing else does: before
        torch 2.2, no line has another.

        Without several such ranks, the log may be of one rank, which is in its file's name.
        """
        unknown = self._ranks.get(-1)
        if unknown is None or len(self._ranks) > 1:
            return
        group_ranks = {rank for rank, _ in unknown.unassigned if rank is not None}
        if len(group_ranks) < 2:
            return
        for (rank, number), timeout in unknown.unassigned.items():
            if rank is not None:
                about = self._about(rank)
                about.columns.timed_out = True
                about.unassigned[rank, number] = timeout
        unknown.unassigned = {
            key: timeout for key, timeout in unknown.unassigned.items() if key[0] is None
        }

    def _columns_of(self, rank: int, about: _RankLines) -> RankColumns:
        columns = about.columns
        columns.rank, columns.world_size = max(rank, -1), self._world_size
        columns.launcher_signal, columns.remarks = self._launcher_signal, self._remarks
        columns.endings = self._endings + self._store_lines
        columns.of_job = rank < 0 and (columns.by_launcher or _tells_nothing(about))
        columns.exception_stack = stack_of(about.exception_frames)
        if self._only_local and rank >= 0:
            columns.problems.append("the log has only local ranks, which were used as ranks")
        if about.unread:
            quoted = shorten(about.first_unread, _UNREAD_MAX, placeholder=" ...")
            columns.problems.append(
                f"{count(about.unread, 'line')} of torch's watchdog could not be read: {quoted}"
            )
            columns.lost_entries = True
        lists: dict[str, list[Any]] = {name: [] for name in DTYPES}
        places: dict[Channel, int] = {}
        for known in about.groups.values():
            self._add_group(columns, lists, known, about, places)
        for communicator in self._communicators:
            _add_calls(columns, lists, communicator, places)
        columns.channels = list(places)
        _add_unplaced(columns, about)
        if about.stack and len(lists["sequence"]) == 1:
            columns.call_stacks = [stack_of(about.stack)]
            lists["stack"] = [0]
        columns.set_columns(lists)
        return columns

    def _add_group(
        self,
        columns: RankColumns,
        lists: dict[str, list[Any]],
        known: _Group,
        about: _RankLines,
        places: dict[Channel, int],
    ) -> None:
        """Add a group's collectives to the columns, and its channel to the indices of those in
        use.
        """
        group, progress = known.group, known.progress
        name = group.name or ("0" if group.is_default else "")
        timeouts = known.timeouts
        for timeout in timeouts.values():
            unplaced = not name or watchdog_wire_op(timeout.op) in _CANNOT_PLACE
            if unplaced and not timeout.has_failed:
                columns.timeouts.append(f"{_timed_out(timeout)}{_group_phrase(group)}")
        if not name:  # a process-local number, which differs between ranks
            return
        channel = Channel(
            ProcessGroup(name=name, ranks=(), description=group.description, backend="nccl"), "cuda"
        )
        columns.groups.append(channel)
        columns.numbers[name] = group.rank
        if progress is not None:
            columns.status[name] = (progress.enqueued, progress.started, progress.completed)
        for number, timeout in timeouts.items():
            if watchdog_wire_op(timeout.op) in _CANNOT_PLACE or (
                progress is not None and number <= progress.completed
            ):
                continue
            columns.args.append(
                CollectiveArgs(
                    watchdog_wire_op(timeout.op),
                    timeout.op,
                    _elements(timeout.inputs),
                    _elements(timeout.outputs),
                )
            )
            has_started = progress is not None and progress.started >= number
            _append(
                lists,
                channel=places.setdefault(channel, len(places)),
                args_index=len(columns.args) - 1,
                sequence=number,
                timeout_ms=timeout.timeout_ms,
                created_ns=_created_ns(timeout, about.times.get(number, 0)),
                state=STARTED if has_started else SCHEDULED,
            )


def _add_work(
    about: _RankLines, text: str, group: L.NamedGroup | None, timeout: L.Timeout | None
) -> None:
    """Add a collective that timed out or failed, and the progress of its group."""
    progress = L.parse_progress(text)
    if timeout is not None:
        about.columns.timed_out = about.columns.timed_out or not timeout.has_failed
        about.unassigned[timeout.group_rank, timeout.number] = timeout
        about.times.setdefault(timeout.number, L.parse_time(text))
    if group is not None and (timeout is not None or progress is not None):
        known = about.groups.setdefault(
            (group.name, group.number if not group.name else ""), _Group(group)
        )
        if progress is not None:
            known.progress = progress
            if progress.number is not None:
                timeout_before = about.unassigned.pop((group.rank, progress.number), None)
                known.failed[progress.number] = timeout_before or known.failed.get(progress.number)
        if timeout is not None:
            known.failed[timeout.number] = timeout
            about.unassigned.pop((timeout.group_rank, timeout.number), None)


def _share_out(unnamed: _RankLines, named: list[_RankLines]) -> None:
    """Give each error that was printed without a rank to the only rank that can have raised it."""
    left = unnamed.columns
    asserted = [one.columns for one in named if ASSERTED in one.columns.exception]
    if len(asserted) == 1:
        asserted[0].device_assertion, left.device_assertion = left.device_assertion, ""
    if left.exception and any(left.exception in one.columns.exception for one in named):
        left.exception = ""
    # according to the launcher, not by a signal
    failed = [one for one in named if one.columns.observation.end is End.FAILED]
    if not left.exception or left.by_launcher or len(failed) != 1:
        return
    raised = failed[0].columns
    if raised.observation.exit_code == 1 and not raised.exception:
        raised.exception, left.exception = left.exception, ""
        failed[0].exception_frames, unnamed.exception_frames = unnamed.exception_frames, []


def _is_raised(rank: int, text: str, frames: list[tuple[str, int, str]]) -> bool:
    """Return whether the first line after the frames of a traceback names an exception of a
    worker.

    Lines without a rank may be of any process, so that only usual names of exceptions count.
    """
    pattern = _NAMED if rank >= 0 and frames else _RAISED
    return pattern.match(text) is not None and not _NO_WORKER.search(text[:120])


def _observed(code: int, ended_ns: int = 0) -> Observation:
    """Return how a process ended with an exit status; -9: killed by signal 9."""
    return Observation(
        end=End.KILLED if code < 0 else End.FAILED,
        exit_code=code if code >= 0 else None,
        signal=signal_name(-code) if code < 0 else None,
        ended_ns=ended_ns,
    )


def _tells_nothing(about: _RankLines) -> bool:
    """Return whether no line says anything about a rank itself."""
    told = (
        about.unassigned
        or about.nccl2_timeouts
        or about.columns.exception
        or about.columns.stuck_watchdog_s
        or about.unread
    )
    return not told and not any(group.failed or group.progress for group in about.groups.values())


def _add_calls(
    columns: RankColumns,
    lists: dict[str, list[Any]],
    communicator: Communicator,
    places: dict[Channel, int],
) -> None:
    """Add what a rank issued on a communicator: those collectives that all its ranks issued alike
    have completed.
    """
    channel = Channel(
        ProcessGroup(name=communicator.name, ranks=communicator.ranks, backend="nccl"), "cuda"
    )
    kinds: dict[NcclCall, int] = {}
    for number, call in communicator.calls.get(columns.rank, {}).items():
        if call not in kinds:
            kinds[call] = len(columns.args)
            columns.args.append(_args_of_call(call))
        _append(
            lists,
            channel=places.setdefault(channel, len(places)),
            args_index=kinds[call],
            sequence=number,
            record_id=len(lists["sequence"]),
            state=COMPLETED if number <= communicator.met else SCHEDULED,
        )


def _add_unplaced(columns: RankColumns, about: _RankLines) -> None:
    """Add notes on the timeouts whose group or number the log does not name."""
    for (group_rank, _), timeout in about.unassigned.items():
        if timeout.has_failed:
            continue
        rank_text = (
            f" on rank {group_rank} of it" if columns.rank < 0 and group_rank is not None else ""
        )
        columns.timeouts.append(
            f"{_timed_out(timeout)}, in a process group that the log does not name{rank_text}"
        )
        columns.unplaced.append((watchdog_wire_op(timeout.op), timeout.number))
    columns.timeouts += [
        f"an operation{_GROUPS.get(name, f' of group {name}')} timed out{_after(limit)}; its"
        " line does not tell which"
        for name, limit in about.nccl2_timeouts.items()
    ]
    del columns.timeouts[_NOTES_MAX:]


def _created_ns(timeout: L.Timeout, time_ns: int) -> int:
    """Return when a collective was issued whose timeout was logged at ``time_ns``; 0: unknown."""
    is_known = time_ns and timeout.ran_ms >= 0
    return max(0, time_ns - timeout.ran_ms * 1_000_000) if is_known else 0


def _append(lists: dict[str, list[Any]], **values: int) -> None:
    """Append a row to the columns; those without a value are unknown."""
    for column, content in lists.items():
        content.append(values.get(column, _UNKNOWN.get(column, 0)))


def _args_of_call(call: NcclCall) -> CollectiveArgs:
    """Return the arguments of a collective in NCCL's words: the count is that of the tensor that
    every rank has.
    """
    specs = (TensorSpec((call.elements,), call.dtype or UNKNOWN_DTYPE, "cuda"),)
    reduce_op = call.reduce_op if call.op in REDUCING and call.reduce_op else None
    return CollectiveArgs(
        call.op, call.op, specs, specs, reduce_op, call.root if call.op in ROOTED else None
    )


def _elements(count: int | None) -> tuple[TensorSpec, ...]:
    return () if count is None else (TensorSpec((count,), UNKNOWN_DTYPE, "cuda"),)


def _timed_out(timeout: L.Timeout) -> str:
    return f"{watchdog_wire_op(timeout.op)} #{timeout.number} timed out{_after(timeout.timeout_ms)}"


def _after(timeout_ms: int) -> str:
    return f" after {timeout_ms / 1000:g} s" if timeout_ms else ""


def _group_phrase(group: L.NamedGroup) -> str:
    if group.name:
        return f" in group {group.description or group.name}"
    named = f" ({group.description})" if group.description else ""
    return (
        f" in the process-local group number {group.number}{named}, which other ranks may number"
        " differently"
    )
