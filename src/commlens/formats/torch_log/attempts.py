"""Tell apart the attempts at a job that one log holds: a scheduler, a script or torchrun started
the job again, and its output was appended. Only the last attempt is kept::

    slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE TO PREEMPTION ***
    E1130 10:00:04.17 ... ProcessGroupNCCL.cpp:632] ...   # last words of the first attempt
    [Gloo] Rank 0 is connected to 1 peer ranks ...        # the second attempt begins

A log of several ranks or nodes, one after the other, is one attempt. So a line shows that another
attempt began only if it was written after the line that says that one ended, or names a rank that
had ended.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from commlens.formats.columns import TEXT_LOG, RankColumns
from commlens.formats.torch_log import lines as L
from commlens.formats.torch_log.log_parser import LogParser

STARTS: Final = re.compile(
    rb"torch[./]distributed[./]run(?:\.py:\d+\]|: \[WARNING\]|:$)|\[Gloo\] Rank \d+ is connected"
    rb"|NCCL version \d"
    rb"|Initializing distributed: |initialization options: size: |will restart worker group"
)
"""Matches every line that may show that an attempt begins."""

_LAST_WORDS_NS: Final = 60 * 1_000_000_000
"""The longest time for which Slurm lets a job go on writing after it said that it ends the job
(KillWait). It starts the job again later."""
# 22.05: of the batch step, which is started again with the job
_ENDED_BY_SLURM: Final = re.compile(
    r"slurmstepd\S*: error: \*\*\* JOB \d+ ON \S+ CANCELLED AT (?P<time>\S+)"
)
# torchrun's, and that of NVIDIA's resiliency extension
_AGENT: Final = re.compile(
    r"(?:E\d{4} [\d:.]{15} (?P<pid>\d+) torch/distributed/elastic/multiprocessing/api\.py:\d+\]"
    r"|\[ft_launcher(?P<ft>\d+)@[^\]]+\]) failed \(exitcode: "
)
_LAUNCHER: Final = re.compile(r"W\d{4} [\d:.]{15} (?P<pid>\d+) torch/distributed/run\.py:")
_DATE: Final = re.compile(r"\d{4}-(\d\d)-(\d\d)T(\d\d:\d\d:\d\d)")


class _AttemptEnd(NamedTuple):
    """The end of an attempt."""

    time_ns: int  # in the log's own time zone and without its year; 0 if unknown
    agent: str  # the pid of torchrun, which may start its workers again; "": of Slurm's whole job


def _end_in(line: str) -> _AttemptEnd | None:
    if found := _ENDED_BY_SLURM.search(line):
        date = _DATE.match(found["time"])
        return _AttemptEnd(L.parse_time(f"E{date[1]}{date[2]} {date[3]}.0") if date else 0, "")
    if found := _AGENT.search(line):
        return _AttemptEnd(L.parse_time(line), found["pid"] or found["ft"])
    return None


def _begins(line: str, end: _AttemptEnd) -> bool:
    """Return whether a line is the first one of the attempt after an end."""
    if "will restart worker group" in line:
        return True
    if found := _LAUNCHER.search(line):
        return found["pid"] != end.agent and L.parse_time(line) > end.time_ns > 0
    return not end.agent and STARTS.search(line.encode()) is not None


def _is_later(line: str, end: _AttemptEnd) -> bool:
    """Return whether the attempt after an end must have begun before this line, by its time."""
    time_ns = L.parse_time(line)
    if not end.time_ns or time_ns <= end.time_ns:
        return False
    if not end.agent:
        return time_ns > end.time_ns + _LAST_WORDS_NS
    again = _end_in(line)
    return again is not None and again.agent == end.agent


class Attempts:
    """Reads a log's lines in order, and keeps what those of the last attempt say.

    Args:
        source: the log's name.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._count = 1
        self._parser = LogParser(source)  # of the attempt that is read
        # After a line that says that the attempt ended: its end, and a parser of the lines since
        # then. These may be last words of the same attempt, or belong to the next one; so both
        # parsers read them, until a line tells which.
        self._end: _AttemptEnd | None = None
        self._next = LogParser(source)
        # After torchrun's list of failed workers: the ranks' processes in it, the last rank in it,
        # and the end that another list reports. That list is of another node, or of the next
        # attempt if it names a rank with another process.
        self._pids: dict[int, str] = {}
        self._rank = -1
        self._second_end: _AttemptEnd | None = None

    def wants(self, line: bytes) -> bool:
        """Return whether a line matters that is of no interest elsewhere."""
        return self._parser.in_block or (self._end is not None and STARTS.search(line) is not None)

    def add_mention(self, rank: int) -> None:
        """Note a rank whose line says nothing else."""
        for parser in self._parsers():
            parser.add_mention(rank)

    def add_line(self, line: str) -> None:
        """Parse one line."""
        if self._end is not None:
            self._begin_if_shown(line, self._end)
        for parser in self._parsers():
            parser.add_line(line)
        if (end := _end_in(line)) is not None:
            self._add_end(end)
        elif self._end is not None and self._end.agent:
            self._add_worker(L.parse_worker_field(line))

    def columns(self) -> list[RankColumns]:
        """Return the columns of each rank in the last attempt."""
        columns = self._parser.columns()
        if not columns and self._count > 1:  # the last one says nothing yet
            columns = [RankColumns(source=self._source, origin=TEXT_LOG)]
        for one in columns:
            one.attempt = self._count
        return columns

    def _parsers(self) -> list[LogParser]:
        return [self._parser] if self._end is None else [self._parser, self._next]

    def _begin_if_shown(self, line: str, end: _AttemptEnd) -> None:
        """Begin the next attempt if a line after the end of one shows that it has begun."""
        if _begins(line, end):
            self._next = LogParser(self._source)
            self._begin_next()
        elif _is_later(line, end):
            self._begin_next()
        elif not end.agent and L.parse_time(line):
            self._next = LogParser(self._source)  # last words

    def _begin_next(self) -> None:
        self._parser, self._end, self._second_end = self._next, None, None
        self._pids = {}
        self._count += 1

    def _add_end(self, end: _AttemptEnd) -> None:
        if self._end is None or not end.agent:
            self._end, self._next, self._second_end = end, LogParser(self._source), None
        elif self._end.agent:
            self._second_end = end
        else:
            self._next = LogParser(self._source)  # torchrun was ended with Slurm's job

    def _add_worker(self, fields: dict[str, str]) -> None:
        """Add a field of a worker in torchrun's list. A rank that two lists name with different
        processes was started twice.
        """
        self._rank = int(fields.get("rank", self._rank))
        if "pid" in fields:
            known = self._pids.setdefault(self._rank, fields["pid"])
            if self._second_end is not None and known != fields["pid"]:
                end = self._second_end
                self._begin_next()
                self._end, self._pids = end, {self._rank: fields["pid"]}
        if fields and self._second_end is None:
            self._next = LogParser(self._source)  # the list belongs to the attempt that ended
