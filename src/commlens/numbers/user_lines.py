"""The line of the user's program that runs."""

from __future__ import annotations

import functools
from pathlib import Path
from types import FrameType

import torch

from commlens.model.frames import FrameKind, KindPrefixes, frame_kind, process_prefixes


def user_line(frame: FrameType | None) -> str:
    """Return the innermost line of the user's program on a stack, ``train.py:42``; that of a
    library if there is none, else "".
    """
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _kind(file)
        if kind is FrameKind.USER or (kind is FrameKind.LIBRARY and not library):
            line = f"{Path(file).name}:{frame.f_lineno}"
            if kind is FrameKind.USER:
                return line
            library = line
        frame = frame.f_back
    return library


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> FrameKind:
    return frame_kind(file, _prefixes())


@functools.lru_cache(maxsize=1)
def _prefixes() -> KindPrefixes:
    return process_prefixes(str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
