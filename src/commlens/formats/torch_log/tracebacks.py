"""Find each rank's exception in a log: Python's tracebacks, also inside of what a launcher prints,
the exception that caused it, and a library's last error after it.

These lines give rank 1 the exception "DistBackendError: NCCL error ...", with the last error below
it, and one frame::

    [rank1]: Traceback (most recent call last):
    [rank1]:   File "train.py", line 81, in main
    [rank1]: torch.distributed.DistBackendError: NCCL error in: ...
    [rank1]: ncclSystemError: System call failed
    [rank1]: Last error:
    [rank1]: socketStartConnect: Connect to 10.0.0.2<40123> failed

Python prints the lines of a rank in order, but those of several ranks may alternate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from commlens.formats.torch_log.rank_lines import FrameLine, RankLines
from commlens.model.ranklog import CAUSED_BY

FRAMES_MAX: Final = 400  # of a stack

_FRAME: Final = re.compile(
    r'\s+File "(?P<file>[^"]{1,4096})", line (?P<line>\d{1,9}), in (?P<function>.{1,400})'
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
    r"\s*(?:(?:NCCL )?Last [Ee]rror:"
    r"|E[A-Z]\d{4}: (?:\[PID: \d+\] )?(?:[\d:.-]{19,} +)?(?!Inner Error))(?P<error>.*)"
)
_HEADER_WITHIN: Final = 4  # lines after an exception
_CAUSE_MAX: Final = 500  # characters of an exception that caused another one


@dataclass(slots=True)
class _Traceback:
    """A traceback that is being read."""

    # " (RANK 3)" if a rank prints another rank's traceback inside its own exception, as torch's
    # CheckpointException does; else ""
    inner_rank_text: str
    frames: list[FrameLine] = field(default_factory=list)  # outermost first


@dataclass(slots=True)
class _AwaitedError:
    """A library's last error, which may follow a rank's exception: a header, and the text in the
    same line or in the next one.
    """

    about: RankLines
    lines_left: int = _HEADER_WITHIN  # until the header
    header_seen: bool = False


class Tracebacks:
    """Reads the lines that may belong to exceptions, in order."""

    def __init__(self) -> None:
        self._reading: dict[int, _Traceback] = {}  # by rank
        self._chained: set[int] = set()  # ranks whose last exception caused the next one
        self._awaited: dict[int, _AwaitedError] = {}  # by rank, the newest exception last
        # The traceback of a worker that a launcher quotes names no rank: its rank, and the indent
        # of its lines. They are known from the line before, "-- Process 1 terminated with the
        # following error:" of spawn(), or from "  traceback : Traceback (most recent call last):"
        # in torchrun's list. -1: none is quoted.
        self._quoted_rank = -1
        self._quoted_indent = ""

    @property
    def in_block(self) -> bool:
        """Whether every line matters: a traceback is being read, or a last error may follow."""
        return bool(self._reading or self._awaited)

    def begins_spawned(self, text: str) -> bool:
        """Return whether a line of torch.multiprocessing.spawn names the process whose traceback
        follows.
        """
        if (found := _SPAWNED.search(text)) is not None:
            self._quoted_rank = int(found[1])
        return found is not None

    def unquote(self, rank: int, text: str, last_worker: int) -> tuple[int, str]:
        """Return a line's rank and text: of a line that a launcher quotes, the rank of the worker,
        and the text without the launcher's indent.

        Args:
            rank: -1 if the line names none.
            text: the line.
            last_worker: the last rank in torchrun's list of failed workers, which quotes its
                traceback.
        """
        if _IN_SUMMARY.match(text):
            self._quoted_rank, self._quoted_indent = last_worker, _SUMMARY_INDENT
        if rank < 0 <= self._quoted_rank:
            return self._quoted_rank, text.removeprefix(self._quoted_indent)
        return rank, text

    def add_line(self, rank: int, about: RankLines, text: str) -> None:
        """Parse a line that may be of a traceback: its first line, a frame, the exception after the
        frames, or the words between two chained exceptions.
        """
        if "Traceback (most recent call last):" in text:
            inner = _OF_RANK.search(text) if about.columns.exception else None
            self._reading[rank] = _Traceback(f" {inner[0]}" if inner is not None else "")
        elif rank not in self._reading:
            if about.columns.exception and _CHAINED.match(text):
                self._chained.add(rank)
            if not about.columns.exception and _BARE.match(text):
                self.set_exception(rank, about, text, [])
        elif found := _FRAME.match(text):
            frames = self._reading[rank].frames
            if len(frames) < FRAMES_MAX:
                frames.append((found["file"], int(found["line"]), found["function"]))
        elif text and not text[0].isspace():
            self._end_traceback(rank, about, text)

    def _end_traceback(self, rank: int, about: RankLines, text: str) -> None:
        """Parse the first line after the frames of a traceback, which names the exception."""
        traceback = self._reading.pop(rank)
        self._quoted_rank, self._quoted_indent = -1, ""
        # lines without a rank may be of any process, so that only usual names count
        pattern = _NAMED if rank >= 0 and traceback.frames else _RAISED
        if traceback.inner_rank_text:
            about.columns.exception += f"{traceback.inner_rank_text} {text[:500]}"
        elif pattern.match(text) and not _NO_WORKER.search(text[:120]):
            self.set_exception(rank, about, text, traceback.frames[::-1])

    def set_exception(
        self, rank: int, about: RankLines, text: str, frames: list[FrameLine]
    ) -> None:
        """Set a rank's exception, and the exception that caused it if a line names one."""
        columns = about.columns
        by_launcher = any(_LAUNCHER.search(file) for file, _, _ in frames)
        # the launcher ends because a worker raised: the worker's exception is kept
        if by_launcher and columns.exception and not columns.by_launcher:
            return
        cause = f"{CAUSED_BY}{columns.exception[:_CAUSE_MAX]}" if rank in self._chained else ""
        self._chained.discard(rank)
        columns.exception, about.exception_frames = text[:1000] + cause, frames
        columns.by_launcher = by_launcher
        if _WITH_LAST_ERROR.search(text):
            self._awaited[rank] = _AwaitedError(about)

    def add_last_error(self, rank: int, text: str) -> None:
        """Add a library's last error to the exception before it: it says what happened. A line
        without a rank (-1) is taken for the newest exception that may have one.
        """
        if not self._awaited:
            return
        of = rank if rank in self._awaited else next(reversed(self._awaited))
        if rank not in (of, -1):
            return
        awaited, error = self._awaited[of], ""
        if awaited.header_seen:
            error = text.strip()  # the line after the header is the error, whatever it says
        elif (header := _LAST_ERROR.match(text)) is not None:
            error = header["error"].strip()
            awaited.header_seen = True
            if not error:
                return
        else:
            awaited.lines_left -= 1
        if error:
            awaited.about.columns.exception += f"\nLast error:\n{error[:_CAUSE_MAX]}"
        if awaited.header_seen or not awaited.lines_left:
            del self._awaited[of]
