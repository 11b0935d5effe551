"""The frames of a stack that runs: the kinds of their files, and the user's line among them."""

from __future__ import annotations

import functools
import os
import tempfile
from types import FrameType

from commlens.model.collective import Frame
from commlens.model.frames import FrameKind, KindPrefixes, frame_kind, process_prefixes


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


def user_frame(frame: FrameType | None) -> Frame | None:
    """Return the innermost line of the user on a stack, else of an installed library, else None."""
    library: Frame | None = None
    while frame is not None:
        code = frame.f_code
        kind = kind_of_file(code.co_filename)
        if kind is FrameKind.USER or (kind is FrameKind.LIBRARY and library is None):
            found = Frame(code.co_filename, frame.f_lineno or 0, code.co_name, kind)
            if kind is FrameKind.USER:
                return found
            library = found
        frame = frame.f_back
    return library


def user_line(frame: FrameType | None) -> str:
    """Return the line of :func:`user_frame` as ``train.py:42``; "" if there is none."""
    found = user_frame(frame)
    return found.where if found is not None else ""
