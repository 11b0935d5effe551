"""Text logs of a job: what torch's watchdog says when a collective times out."""

from __future__ import annotations

from typing import BinaryIO

from commlens.formats.rows import Rows

__all__ = ["read_torch_log"]


def read_torch_log(stream: BinaryIO, source: str) -> list[Rows]:
    """What a log says of each rank that speaks in it; nothing where it does not speak of collectives."""
    return []
