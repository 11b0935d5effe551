"""What commlens logs in a process."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple


class Heard(NamedTuple):
    """What was logged."""

    lines: list[str]  # without the last one
    verdicts: list[Any]  # with these lines
    last: list[str]  # the line that says which steps were compared


def listen() -> Heard:
    """Listen to what this process logs from now on. Return lists that fill."""
    heard = Heard([], [], [])

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            is_last = text.startswith("commlens: compared ")
            (heard.last if is_last else heard.lines).append(text)
            if (verdict := getattr(record, "verdict", None)) is not None:
                heard.verdicts.append(verdict)

    logging.getLogger("commlens").addHandler(Listen())
    return heard
