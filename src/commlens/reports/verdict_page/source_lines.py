"""A few lines of source around the culprit's line, where the file is still readable and as old as
the evidence.
"""

from __future__ import annotations

import re
import stat
from itertools import islice
from pathlib import Path

from commlens.model.verdict import Verdict
from commlens.reports.verdict_page.data import SourceLines
from commlens.text import clean

_AROUND = 4  # lines before and after
_LONGEST = 160  # characters of a line
_LARGEST = 4_000_000  # bytes of a file


def source_lines(verdict: Verdict, captured_ns: int) -> SourceLines | None:
    """Return the lines around that of the first finding; None if there are none to trust.

    A dump can name any file, so only regular Python files are read. A file that is newer than the
    evidence, or that does not hold the function, is not the one that ran.

    Args:
        verdict: the verdict.
        captured_ns: when the evidence was recorded, Unix ns; 0 if unknown.
    """
    finding = verdict.findings[0] if verdict.findings else None
    name, _, number = (
        (finding.source_file or "").rpartition(":") if finding is not None else ("", "", "")
    )
    if (
        finding is None
        or not name.endswith(".py")
        or not Path(name).is_absolute()
        or not number.isdecimal()
    ):
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
    function = finding.function or ""
    if function.isidentifier() and not any(
        re.search(rf"\b(def|class)\s+{function}\b", text) for text in read[:line]
    ):
        return None
    lines = [
        clean(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
        for text in read[first - 1 :]
    ]
    return SourceLines(first, line, lines) if line - first < len(lines) else None
