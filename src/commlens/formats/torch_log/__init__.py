"""Read a job's text logs, often the only evidence: messages of torch's watchdog, Python and
torchrun for each rank.

Only collectives that timed out become operations. The progress of process groups is in
:attr:`RankColumns.status`, the end of a process in :attr:`RankColumns.exception` and
:attr:`RankColumns.observation`. A collective in a process group that the log does not name is only
in :attr:`RankColumns.timeouts`: it cannot be aligned across ranks, so it blames no rank.
"""

from __future__ import annotations

import io
import re
from typing import BinaryIO, Final

from commlens.formats.columns import RankColumns
from commlens.formats.torch_log import endings, lines
from commlens.formats.torch_log.attempts import Attempts
from commlens.formats.torch_log.lines import MENTION

_LINE_MAX: Final = 1 << 16  # bytes of a line that are read
_INTERESTING: Final = re.compile(lines.INTERESTING.pattern + b"|" + endings.INTERESTING.pattern)


def read_torch_log(stream: BinaryIO, source: str) -> list[RankColumns]:
    """Return the columns of each rank with messages in a log; none if the log mentions no
    collective or failure. Of a log that holds several attempts, it is the last one that counts.

    The stream is read once. The rank is not inferred from the file's name: lines without a rank
    belong to rank -1.
    """
    attempts = Attempts(source)
    text = io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream
    while line := text.readline(_LINE_MAX):
        if _INTERESTING.search(line) or attempts.wants(line):
            attempts.add_line(line.decode("utf-8", "replace").rstrip("\r\n"))
        elif found := MENTION.match(line):
            attempts.add_mention(int(found[1]))
    return attempts.columns()
