"""Keep, of a log that holds several attempts at a job, what the last one says.

A scheduler, a script or torchrun started the job again, and its output was appended::

    slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-30T10:00:00 DUE TO PREEMPTION ***
    E1130 10:00:04.17 ... ProcessGroupNCCL.cpp:632] ...   # last words of the first attempt
    [Gloo] Rank 0 is connected to 1 peer ranks ...        # the second attempt begins

A log of several ranks or nodes, one after the other, is one attempt. So a line shows that another
attempt began only if it was written after the line that says that one ended, or names a rank that
had ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
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

    time_ns: int  # in the log's own time zone, read as UTC; 0 if unknown
    agent: str  # the pid of torchrun, which may start its workers again; "": of Slurm's whole job


@dataclass
class _AfterEnd:
    """The lines after one that says that the attempt ended: its last words, or the next attempt."""

    end: _AttemptEnd
    since: LogParser  # has read these lines; the next attempt's, if a line shows that it began
    # Of torchrun's list of failed workers: the pids by rank, and the last rank in it. Another list
    # is of another node, or of the next attempt if it names a rank with another pid.
    pids: dict[int, str] = field(default_factory=dict)
    rank: int = -1
    second_end: _AttemptEnd | None = None  # before that other list


class Attempts:
    """Reads a log's lines in order, and keeps what those of the last attempt say.

    Args:
        source: the log's name.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._count = 1
        self._parser = LogParser(source)  # of the attempt that is read
        self._after: _AfterEnd | None = None  # a line said that it ended

    def wants(self, line: bytes) -> bool:
        """Return whether a line matters that is of no interest elsewhere."""
        return self._parser.in_block or (
            self._after is not None and STARTS.search(line) is not None
        )

    def add_mention(self, rank: int) -> None:
        """Note a rank whose line says nothing else."""
        for parser in self._parsers():
            parser.add_mention(rank)

    def add_line(self, line: str) -> None:
        """Parse one line."""
        if self._after is not None:
            self._begin_if_shown(line, self._after)
        for parser in self._parsers():
            parser.add_line(line)
        if (end := _end_in(line)) is not None:
            self._add_end(end)
        elif self._after is not None and self._after.end.agent:
            self._add_worker(L.parse_worker_field(line), self._after)

    def columns(self) -> list[RankColumns]:
        """Return the columns of each rank in the last attempt."""
        columns = self._parser.columns()
        if not columns and self._count > 1:  # the last one says nothing yet
            columns = [RankColumns(source=self._source, origin=TEXT_LOG)]
        for one in columns:
            one.attempt = self._count
        return columns

    def _parsers(self) -> list[LogParser]:
        # until a line tells of which attempt the lines after an end are, they are read for both
        return [self._parser, *([self._after.since] if self._after is not None else [])]

    def _begin_if_shown(self, line: str, after: _AfterEnd) -> None:
        """Begin the next attempt if a line after the end of one shows that it has begun."""
        if _begins(line, after.end):
            self._begin_next(LogParser(self._source))
        elif _is_later(line, after.end):
            self._begin_next(after.since)
        elif not after.end.agent and L.parse_time(line):
            after.since = LogParser(self._source)  # all lines up to here were last words

    def _begin_next(self, parser: LogParser) -> None:
        self._parser, self._after = parser, None
        self._count += 1

    def _add_end(self, end: _AttemptEnd) -> None:
        if self._after is None or not end.agent:
            self._after = _AfterEnd(end, LogParser(self._source))
        elif self._after.end.agent:
            self._after.second_end = end
        else:
            self._after.since = LogParser(self._source)  # torchrun was ended with Slurm's job

    def _add_worker(self, fields: dict[str, str], after: _AfterEnd) -> None:
        """Add a field of a worker in torchrun's list. A rank that two lists name with different
        pids was started twice.
        """
        after.rank = int(fields.get("rank", after.rank))
        if "pid" in fields:
            known = after.pids.setdefault(after.rank, fields["pid"])
            if after.second_end is not None and known != fields["pid"]:
                pids = {after.rank: fields["pid"]}
                end, parser = after.second_end, LogParser(self._source)
                self._begin_next(after.since)
                self._after = _AfterEnd(end, parser, pids, after.rank)
                return
        if fields and after.second_end is None:
            after.since = LogParser(self._source)  # the list belongs to the attempt that ended


def _end_in(line: str) -> _AttemptEnd | None:
    """Return the end that a line reports; None if it reports none."""
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
    # After the workers of one torchrun have failed, that of another node may still begin the same
    # attempt; not after Slurm has ended the whole job.
    return not end.agent and STARTS.search(line.encode()) is not None


def _is_later(line: str, end: _AttemptEnd) -> bool:
    """Return whether the attempt after an end must have begun before this line, by its time."""
    time_ns = L.parse_time(line)
    if not end.time_ns or time_ns <= end.time_ns:
        return False
    if not end.agent:
        return time_ns > end.time_ns + _LAST_WORDS_NS
    again = _end_in(line)  # a torchrun whose workers fail twice has started them in between
    return again is not None and again.agent == end.agent
