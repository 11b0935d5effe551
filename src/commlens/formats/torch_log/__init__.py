"""Text logs of a job: often all that there is. What torch's watchdog, Python and torchrun say of each rank becomes rows.

Few rows: the collectives that timed out. How far each process group had come is in :attr:`RankColumns.status`, how a process ended in
:attr:`RankColumns.exception` and :attr:`RankColumns.observation`. A collective in a process group that the log does not name is told in
:attr:`RankColumns.troubles` only: it can be placed beside no other rank's, so nobody may be blamed by it.
"""

from __future__ import annotations

import io
from typing import BinaryIO, Final

from commlens.formats.columns import RankColumns
from commlens.formats.torch_log.lines import INTERESTING
from commlens.formats.torch_log.log_parser import Teller

__all__ = ["read_torch_log"]

_LINE_MAX: Final = 1 << 16  # bytes of a line that are looked at


def read_torch_log(stream: BinaryIO, source: str) -> list[RankColumns]:
    """What a log says of each rank that speaks in it; nothing where it does not speak of collectives or failures.

    Args:
        stream: the content, read once from beginning to end.
        source: the file's name. It is not looked at: where no line says which rank speaks, the rows' rank is -1.
    """
    teller = Teller(source)
    text = io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream
    while line := text.readline(_LINE_MAX):
        if teller.listening or INTERESTING.search(line):
            teller.hear(line.decode("utf-8", "replace").rstrip("\r\n"))
    return teller.rows()
