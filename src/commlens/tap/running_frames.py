"""The frames of a stack that runs: the kinds of their files, and the user's line among them."""

from __future__ import annotations

import functools
import os
import tempfile
from types import CodeType, FrameType

from commlens.model.collective import Frame
from commlens.model.frames import FrameKind, KindPrefixes, frame_kind, process_prefixes
from commlens.text import printable


@functools.lru_cache(maxsize=4096)
def kind_of_file(file: str) -> FrameKind:
    """Classify a source file of this process."""
    return frame_kind(file, _prefixes())


@functools.lru_cache(maxsize=1)
def _prefixes() -> KindPrefixes:
    import torch

    commlens = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    usual = os.path.join(tempfile.gettempdir(), "torchinductor_")  # noqa: PTH118
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual
    folder = os.path.dirname(torch.__file__)  # noqa: PTH120
    return [(generated, FrameKind.TORCH), *process_prefixes(folder, commlens)]


def frame_of(code: CodeType, line: int | None) -> Frame:
    """Return a line of this process as reports hold it: in JSON, a file name must be valid text."""
    file = code.co_filename
    return Frame(printable(file), line or 0, code.co_name, kind_of_file(file))


def user_frame(frame: FrameType | None) -> Frame | None:
    """Return the innermost line of the user on a stack, else of an installed library, else None."""
    library: Frame | None = None
    while frame is not None:
        kind = kind_of_file(frame.f_code.co_filename)
        if kind is FrameKind.USER:
            return frame_of(frame.f_code, frame.f_lineno)
        if kind is FrameKind.LIBRARY and library is None:
            library = frame_of(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return library


def user_line(frame: FrameType | None) -> str:
    """Return the line of :func:`user_frame` as ``train.py:42``; "" if there is none."""
    found = user_frame(frame)
    return found.where if found is not None else ""
