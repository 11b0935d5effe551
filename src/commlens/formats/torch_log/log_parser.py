"""Collect what a log's lines say about each rank.

:class:`LogParser` reads the lines: those of torch's watchdog here, exceptions in
:mod:`~commlens.formats.torch_log.tracebacks`. After the last line it assigns to ranks and groups
what no line could assign alone, and :mod:`~commlens.formats.torch_log.log_columns` converts the
result. So the lines ::

    [rank1]:[E...] [PG ID 0 PG GUID 0(default_pg) Rank 1] ... WorkNCCL(SeqNum=8, OpType=ALLREDUCE...
    [rank1]: ValueError: no batch is left

become columns of rank 1 with an all_reduce of number 8 in flight, and with an exception.
"""

from __future__ import annotations

import re
from textwrap import shorten
from typing import Final

from commlens.formats.columns import TEXT_LOG, EndingLine, RankColumns
from commlens.formats.torch_log import lines as L
from commlens.formats.torch_log.endings import (
    parse_ending,
    parse_failed_node,
    parse_rank_ending,
    parse_xid,
)
from commlens.formats.torch_log.log_columns import NOTES_MAX, UNREAD_MAX, columns_of
from commlens.formats.torch_log.nccl_lines import NcclLines
from commlens.formats.torch_log.rank_lines import GroupLines, JobLines, RankLines
from commlens.formats.torch_log.tracebacks import FRAMES_MAX, Tracebacks
from commlens.model.cause import OF_THE_STORE
from commlens.model.device_assertion import ASSERTED, parse_device_assertion
from commlens.model.grouping import grouped
from commlens.model.ranklog import End, Observation
from commlens.text import clean, signal_name

_RANKS_MAX: Final = 100_000
_STORE_LINES_MAX: Final = 6
_PARTS_MAX: Final = 6  # of a wrapped line

_FAILED_FRAME: Final = re.compile(
    r"#\d{1,4} (?P<function>.{1,400}) from (?P<file>.{1,4096}):(?P<line>\d{1,9})\s*$"
)
_CUDA_ERROR: Final = re.compile(r"CUDA error: [^\n]{1,200}|CUDA out of memory[^\n]{0,160}")
_NCCL_ERROR: Final = re.compile(r"NCCL error: [^\n]{1,200}")
_FATAL: Final = re.compile(r"Fatal Python error: [^\n]{1,160}")
# of gloo, in C++
_UNCAUGHT: Final = re.compile(r"^\s*what\(\):\s+(?P<error>\[enforce fail at .{1,400})")
# of torch, in C++
_UNCAUGHT_CUDA: Final = re.compile(r"^\s*what\(\):\s+(?P<error>CUDA error: .{1,200})")


class _WrappedLines:
    """Joins the parts of a watchdog's line that a terminal or a collector has wrapped."""

    def __init__(self) -> None:
        self.parts: list[str] = []  # of a line whose end has not come

    def add(self, line: str) -> list[str]:
        """Return the lines that are whole now."""
        if not self.parts or L.begins_message(line) or len(self.parts) >= _PARTS_MAX:
            before = self.take_parts()
            self.parts = [line] if L.may_go_on(line) else []
            return before if self.parts else [*before, line]
        self.parts.append(L.parse_origin(line).line)
        for joined in ("".join(self.parts), " ".join(part.strip() for part in self.parts)):
            if L.is_whole(joined):
                self.parts = []
                return [joined]
        return []

    def take_parts(self) -> list[str]:
        """Give up joining: return the parts as separate lines."""
        parts, self.parts = self.parts, []
        return parts


class LogParser:
    """Reads a log's lines in order and collects the state of each rank."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ranks: dict[int, RankLines] = {}
        self._job = JobLines()
        self._wrapped = _WrappedLines()
        self._tracebacks = Tracebacks()
        self._nccl = NcclLines()
        # global rank by torchrun's local rank or srun's task, from lines with both
        self._global: dict[int, int] = {}
        # the rank whose failed collective's stack is being read
        self._stack_of: RankLines | None = None
        # torchrun's list of failed workers
        self._worker: dict[str, str] = {}  # the fields of one, so far
        self._last_worker = -1  # the last rank
        self._pids: dict[int, str] = {}  # by rank

    @property
    def in_block(self) -> bool:
        """Whether a traceback, a stack or a wrapped line is being read, so that every line
        matters.
        """
        return bool(self._tracebacks.in_block or self._stack_of is not None or self._wrapped.parts)

    def add_mention(self, rank: int) -> None:
        """Note a rank whose line says nothing else."""
        self._about(rank)
        # torch knows the rank: its store was reached
        self._job.store_lines = []

    def _about(self, rank: int) -> RankLines:
        """Return what lines have said about a rank so far. Of ranks beyond the limit, nothing is
        kept.
        """
        about = self._ranks.get(rank)
        if about is None:
            about = RankLines(RankColumns(source=self._source, origin=TEXT_LOG))
            if len(self._ranks) < _RANKS_MAX:
                self._ranks[rank] = about
        return about

    def add_line(self, line: str) -> None:
        """Parse one line. If it continues the message of the line before, join it to that line."""
        for whole in self._wrapped.add(line):
            self._add_whole_line(whole)

    def _add_whole_line(self, line: str) -> None:
        origin = L.parse_origin(line)
        text = origin.line
        if origin.rank is not None and origin.local is not None:
            self._global[origin.local] = origin.rank
        group = L.parse_group(text)
        rank = self._rank_of(origin, group)
        # of the job, of processes, or of the rank that the text names
        self._nccl.add(text, rank)
        self._add_to_job(text, rank)
        self._add_worker_field(text)
        self._add_rank_ending(text)
        # of the rank that wrote the line
        rank, text = self._tracebacks.unquote(rank, text, self._last_worker)
        about = self._about(rank)
        if rank not in self._ranks:
            return  # beyond the limit
        about.columns.captured_ns = L.parse_time(line) or about.columns.captured_ns
        self._tracebacks.add_last_error(rank, text)
        self._add_watchdog_line(rank, about, text, group)
        self._tracebacks.add_line(rank, about, text)

    def _rank_of(self, origin: L.Origin, group: L.NamedGroup | None) -> int:
        """Return the global rank that wrote a line; -1 if unknown."""
        if origin.rank is not None:
            return origin.rank
        if group is not None and group.is_default:
            return group.rank
        if origin.local is not None:
            if origin.local not in self._global:
                self._job.only_local = True
            return self._global.get(origin.local, origin.local)
        return -1

    # --- the job

    def _add_to_job(self, text: str, rank: int) -> None:
        job = self._job
        job.remarks += L.parse_remarks(text)[: NOTES_MAX - len(job.remarks)]
        job.launcher_signal = L.parse_launcher_signal(text) or job.launcher_signal
        job.is_of_a_job = job.is_of_a_job or L.is_of_a_job(text)
        job.world_size = max(job.world_size, L.number_in(L.WORLD_SIZE, text))
        if self._tracebacks.begins_spawned(text):
            job.only_local = True
        # srun prints this as it begins to end the ranks; the node says later who ended the job
        if "srun: Job step aborted" in text:
            job.aborted_first = job.aborted_first or not self._any_raised()
        ending = parse_ending(text)
        if ending in OF_THE_STORE:
            quoted = shorten(L.without_head(text), UNREAD_MAX, placeholder=" ...")
            newest = EndingLine(ending, quoted, rank=rank, listens="server socket" in text)
            others = [line for line in job.store_lines if line != newest]
            job.store_lines = [*others, newest][-_STORE_LINES_MAX:]
        elif ending is not None and len(job.endings) < NOTES_MAX:
            quoted = shorten(text, UNREAD_MAX, placeholder=" ...")
            before_errors = job.aborted_first or not self._any_raised()
            job.endings.append(
                EndingLine(
                    ending,
                    quoted,
                    parse_xid(text),
                    node=parse_failed_node(text),
                    before_errors=before_errors,
                )
            )

    def _any_raised(self) -> bool:
        return any(about.columns.exception for about in self._ranks.values())

    def _add_worker_field(self, text: str) -> None:
        """Parse torchrun's list of failed workers: time, host, rank and exit status of each, in
        this order.
        """
        self._worker |= L.parse_worker_field(text)
        if "exit" not in self._worker:
            return
        worker, self._worker = self._worker, {}
        rank = int(worker.get("rank", -1))
        if rank >= 0:
            about = self._about(rank)
            ended_ns = L.parse_torchrun_time(worker.get("time", ""))
            about.columns.host = worker.get("host", "")
            about.columns.observation = _observed(int(worker["exit"]), ended_ns)
            self._last_worker, self._pids[rank] = rank, worker["pid"]

    def _add_rank_ending(self, text: str) -> None:
        """Add how a rank ended according to mpirun or Lightning."""
        if (ending := parse_rank_ending(text)) is None:
            return
        rank = self._global.get(ending.rank, ending.rank) if ending.is_local else ending.rank
        self._job.only_local = self._job.only_local or (ending.is_local and not self._global)
        columns = self._about(rank).columns
        columns.host = ending.host or columns.host
        columns.observation = _observed(ending.code)

    # --- torch's watchdog

    def _add_watchdog_line(
        self, rank: int, about: RankLines, text: str, group: L.NamedGroup | None
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
            self._stack_of, about.stack = about, []
        elif self._stack_of is not None and (about is self._stack_of or rank < 0):
            # its lines may have no prefix
            self._add_stack_line(self._stack_of, text)
        about.columns.device_assertion = about.columns.device_assertion or clean(
            parse_device_assertion(text)
        )
        self._add_error(rank, about, text, failed=timeout is not None and timeout.has_failed)

    def _add_error(self, rank: int, about: RankLines, text: str, *, failed: bool) -> None:
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
            self._tracebacks.set_exception(rank, about, found[0], [])

    def _add_stack_line(self, about: RankLines, text: str) -> None:
        """Parse a line of the failed collective's stack, or the line after it."""
        found = _FAILED_FRAME.match(text)
        if found is None:
            self._stack_of = None
        elif len(about.stack) < FRAMES_MAX:
            about.stack.append((found["file"], int(found["line"]), found["function"]))

    # --- after the last line

    def columns(self) -> list[RankColumns]:
        """Return the columns of each rank that a line names, even if the line says nothing else
        about it; if no line names one, of rank -1.
        """
        for part in self._wrapped.take_parts():
            self._add_whole_line(part)
        self._split_by_group_rank()
        self._forget_mixed_counters()
        self._add_nccl_ranks()
        self._assign_unnamed_errors()
        job = self._job
        found = [columns_of(rank, about, job) for rank, about in sorted(self._ranks.items())]
        of_ranks = [one for one in found if _tells_of_a_rank(one)]
        about_job = job.launcher_signal or job.endings or job.store_lines or job.remarks
        # what tells of no rank is of rank -1, and one at most
        return of_ranks or (found if about_job or job.is_of_a_job else [])

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
        for (rank, number), timeout in list(unknown.unassigned.items()):
            if rank is not None:
                self._about(rank).columns.timed_out = True
                self._about(rank).unassigned[rank, number] = timeout
                del unknown.unassigned[rank, number]

    def _forget_mixed_counters(self) -> None:
        """Forget the progress of groups that send messages: the counter is that of messages or of
        collectives, whichever was last.
        """
        groups = [group for about in self._ranks.values() for group in about.groups.values()]
        mixed = {one.group.name for one in groups if one.sends_messages}
        for one in groups:
            if one.group.name in mixed:
                one.progress = None

    def _add_nccl_ranks(self) -> None:
        """Add the ranks that NCCL's own lines name, and the ops that they issued."""
        self._job.world_size = max(self._job.world_size, self._nccl.world_size())
        for rank, pid in self._pids.items():
            self._nccl.note_rank(pid, rank)
        self._match_last_errors()
        for process, rank in self._nccl.ranks().items():
            about = self._about(rank)
            self._job.store_lines = []  # the rank has reached torch's store
            if "CCL" in about.columns.exception:
                about.columns.warnings += self._nccl.warnings.get(process, ())
                about.columns.host = about.columns.host or process[0]
        for rank, place in self._nccl.places().items():
            self._about(rank).add_place(rank, place)
        self._job.communicators = self._nccl.communicators()

    def _match_last_errors(self) -> None:
        """Find the ranks of processes by a warning that is the last error of one rank alone."""
        said = grouped(
            (warning.partition("NCCL WARN ")[2].strip(), pid)
            for (_, pid), warnings in self._nccl.warnings.items()
            for warning in warnings
        )
        raised = grouped(
            (about.columns.exception.partition("\nLast error:\n")[2], rank)
            for rank, about in self._ranks.items()
        )
        for text, pids in said.items():
            ranks = raised.get(text, [])
            if len({*pids}) == len(ranks) == 1:
                self._nccl.note_rank(pids[0], ranks[0])

    def _assign_unnamed_errors(self) -> None:
        """Give what C++ and the device print without a rank to the rank whose exception is of the
        same error: Python prints that once more, with the rank.
        """
        if (unnamed := self._ranks.get(-1)) is not None:
            _share_out(unnamed, [about for rank, about in self._ranks.items() if rank >= 0])
        for about in self._ranks.values():
            if about.columns.device_assertion and not about.columns.exception:
                about.columns.exception = f"CUDA error: {ASSERTED} triggered"


def _tells_of_a_rank(one: RankColumns) -> bool:
    """Return whether a log tells of a fault, or of a rank by its number."""
    fault = one.timeouts or one.exception or one.stuck_watchdog_s or one.lost_entries
    return one.rank >= 0 or bool(fault)


def _add_work(
    about: RankLines, text: str, group: L.NamedGroup | None, timeout: L.Timeout | None
) -> None:
    """Add a collective that timed out or failed, and the progress of its group."""
    progress = L.parse_progress(text)
    if timeout is not None:
        about.columns.timed_out = about.columns.timed_out or not timeout.has_failed
        about.times.setdefault(timeout.number, L.parse_time(text))
        about.unassigned[timeout.group_rank, timeout.number] = timeout
    if group is None or (timeout is None and progress is None):
        return
    known = about.groups.setdefault(
        (group.name, group.number if not group.name else ""), GroupLines(group)
    )
    if progress is not None:
        known.progress = progress
        if progress.number is not None:
            # an earlier line, which did not name the group, may have told its timeout
            earlier = about.unassigned.pop((group.rank, progress.number), None)
            known.uncompleted[progress.number] = earlier or known.uncompleted.get(progress.number)
    if timeout is not None:
        known.uncompleted[timeout.number] = timeout
        about.unassigned.pop((timeout.group_rank, timeout.number), None)


def _share_out(unnamed: RankLines, named: list[RankLines]) -> None:
    """Give each error that was printed without a rank to the only rank that can have raised it."""
    left = unnamed.columns
    asserted = [one.columns for one in named if ASSERTED in one.columns.exception]
    if len(asserted) == 1:
        asserted[0].device_assertion = asserted[0].device_assertion or left.device_assertion
        left.device_assertion = ""
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


def _observed(code: int, ended_ns: int = 0) -> Observation:
    """Return how a process ended with an exit status; -9: killed by signal 9."""
    return Observation(
        end=End.KILLED if code < 0 else End.FAILED,
        exit_code=code if code >= 0 else None,
        signal=signal_name(-code) if code < 0 else None,
        ended_ns=ended_ns,
    )
