"""A few lines of source around the culprit's line, and around that of the ranks that disagree with
it, where the files are still readable and as old as the evidence.
"""

from __future__ import annotations

import re
import stat
from collections import defaultdict
from itertools import islice
from pathlib import Path

from commlens.model.collective import Frame
from commlens.reports.verdict_page.data import OtherLine, SourceLines
from commlens.reports.verdict_page.job import PageJob
from commlens.text import clean, format_ranks

_AROUND = 4  # lines before and after
_LONGEST = 160  # characters of a line
_LARGEST = 4_000_000  # bytes of a file


def culprits_lines(job: PageJob) -> SourceLines | None:
    """Return the lines around that of the first finding; None if there are none to trust."""
    finding = job.verdict.findings[0] if job.verdict.findings else None
    if finding is None:
        return None
    return source_lines(finding.source_file or "", finding.function or "", _captured(job))


def others_line(job: PageJob) -> OtherLine | None:
    """Return where the ranks that disagree with the culprits issued the collective; None if the
    first finding is no mismatch, or they issued it at the culprits' line.
    """
    finding = job.verdict.findings[0] if job.verdict.findings else None
    if finding is None or not finding.kind.startswith("mismatch/") or not job.focus:
        return None
    channel, number, focused = job.focus[0]
    ranks: dict[Frame, list[int]] = defaultdict(list)
    for rank in channel[2] if focused is finding else ():
        op = job.op_of(rank, channel, number)
        if rank not in finding.culprits and op is not None and op.source is not None:
            ranks[op.source].append(rank)
    if not ranks:
        return None
    frame = max(ranks, key=lambda each: len(ranks[each]))
    file = f"{frame.file}:{frame.line}"
    if file == finding.source_file:
        return None
    return OtherLine(
        format_ranks(ranks[frame]),
        f"{file} {frame.function}".strip(),
        source_lines(file, frame.function, _captured(job)),
    )


def _captured(job: PageJob) -> int:
    views = job.index.views.values() if job.has_times else ()
    return max((view.now_ns for view in views), default=0)


def source_lines(source_file: str, function: str, captured_ns: int) -> SourceLines | None:
    """Return the lines around one; None if there are none to trust.

    A dump can name any file, so only regular Python files are read. A file that is newer than the
    evidence, or that does not hold the function, is not the one that ran.

    Args:
        source_file: the file's path and the line's number, joined by a colon.
        function: the function's name; empty if unknown.
        captured_ns: when the evidence was recorded, Unix ns; 0 if unknown.
    """
    name, _, number = source_file.rpartition(":")
    if not name.endswith(".py") or not Path(name).is_absolute() or not number.isdecimal():
        return None
    first, line = max(1, int(number) - _AROUND), int(number)
    try:
        about = Path(name).stat()
        if (
            not stat.S_ISREG(about.st_mode)
            or about.st_size > _LARGEST
            or 0 < captured_ns < about.st_mtime_ns
        ):
            return None
        with Path(name).open(encoding="utf-8", errors="replace") as file:
            read = [text.rstrip("\n").expandtabs(4) for text in islice(file, line + _AROUND)]
    except (OSError, ValueError):
        return None
    if function.isidentifier() and not any(
        re.search(rf"\b(def|class)\s+{function}\b", text) for text in read[:line]
    ):
        return None
    lines = [
        clean(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
        for text in read[first - 1 :]
    ]
    return SourceLines(first, line, lines) if line - first < len(lines) else None
