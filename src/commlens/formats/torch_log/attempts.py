"""Tell apart the attempts at a job that one log holds: a scheduler, a script or torchrun started
the job again, and its output was appended.

Only the last attempt is kept. A log of several ranks or nodes, one after the other, is one attempt:
what says that another began must have been written after what says that one ended, or name a rank
that had ended.
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
"""Slurm lets a job write on for so long at most after it said that it ends it (KillWait), and
starts it again later."""
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


class _End(NamedTuple):
    """The end of an attempt."""

    time_ns: int  # in the log's own time zone and without its year; 0 if unknown
    agent: str  # the pid of torchrun, which may start its workers again; "": of Slurm's whole job


def _end_in(line: str) -> _End | None:
    if found := _ENDED_BY_SLURM.search(line):
        date = _DATE.match(found["time"])
        return _End(L.parse_time(f"E{date[1]}{date[2]} {date[3]}.0") if date else 0, "")
    if found := _AGENT.search(line):
        return _End(L.parse_time(line), found["pid"] or found["ft"])
    return None


def _begins(line: str, end: _End) -> bool:
    """Return whether a line shows that an attempt begins after that end."""
    if "will restart worker group" in line:
        return True
    if found := _LAUNCHER.search(line):
        return found["pid"] != end.agent and L.parse_time(line) > end.time_ns > 0
    return not end.agent and STARTS.search(line.encode()) is not None


def _is_later(line: str, end: _End) -> bool:
    """Return whether the attempt after an end has begun before this line."""
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
        self._parser = LogParser(source)
        self._end: _End | None = None  # of the attempt that is read
        self._next = LogParser(source)  # the lines after it
        self._another: _End | None = None  # of another torchrun: on another node, or the next one
        self._pids: dict[int, str] = {}  # of the workers in torchrun's lists, by rank
        self._rank = -1  # the last in such a list

    def wants(self, line: bytes) -> bool:
        """Return whether a line matters that is of no interest elsewhere."""
        return self._parser.in_block or (self._end is not None and STARTS.search(line) is not None)

    def add_mention(self, rank: int) -> None:
        """Note a rank whose line says nothing else."""
        for parser in self._parsers():
            parser.add_mention(rank)

    def _parsers(self) -> list[LogParser]:
        return [self._parser] if self._end is None else [self._parser, self._next]

    def add_line(self, line: str) -> None:
        """Parse one line."""
        if self._end is not None:
            self._follow(line, self._end)
        for parser in self._parsers():
            parser.add_line(line)
        if (end := _end_in(line)) is not None:
            self._add_end(end)
        elif self._end is not None and self._end.agent:
            self._add_worker(L.parse_worker_field(line))

    def _follow(self, line: str, end: _End) -> None:
        """Begin another attempt if a line after the end of one shows it."""
        if _begins(line, end):
            self._next = LogParser(self._source)
            self._begin()
        elif _is_later(line, end):
            self._begin()
        elif not end.agent and L.parse_time(line):
            self._next = LogParser(self._source)  # last words

    def _begin(self) -> None:
        self._parser, self._end, self._another = self._next, None, None
        self._pids = {}
        self._count += 1

    def _add_end(self, end: _End) -> None:
        if self._end is None or not end.agent:
            self._end, self._next, self._another = end, LogParser(self._source), None
        elif self._end.agent:
            self._another = end
        else:
            self._next = LogParser(self._source)  # torchrun was ended with Slurm's job

    def _add_worker(self, fields: dict[str, str]) -> None:
        """Note a worker in torchrun's list of those that failed. A rank that two lists name with
        different processes was started twice.
        """
        self._rank = int(fields.get("rank", self._rank))
        if "pid" in fields:
            known = self._pids.setdefault(self._rank, fields["pid"])
            if self._another is not None and known != fields["pid"]:
                end = self._another
                self._begin()
                self._end, self._pids = end, {self._rank: fields["pid"]}
        if fields and self._another is None:
            self._next = LogParser(self._source)  # the list belongs to the attempt that ended

    def columns(self) -> list[RankColumns]:
        """Return the columns of each rank in the last attempt."""
        columns = self._parser.columns()
        if not columns and self._count > 1:  # the last one says nothing yet
            columns = [RankColumns(source=self._source, origin=TEXT_LOG)]
        for one in columns:
            one.attempt = self._count
        return columns
