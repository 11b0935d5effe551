"""Files for which a program looks. Ranks run one after another, so that some find a file that
others wrote, where a real job has all of them find it, or none.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from commlens.check.sequence import FileLook
from commlens.model.collective import Frame
from commlens.model.frames import FrameKind
from commlens.tracing.attribution.stacks import kind_of_file
from commlens.tracing.patches import Patches


class Files:
    """Notes for which files the program looks, and whether they exist."""

    def __init__(self) -> None:
        self.looks: dict[str, FileLook] = {}
        """The first look for each path."""

    def install(self, patches: Patches) -> None:
        """Wrap the functions that look for files."""
        for owner, names in (
            (os.path, ("exists", "isfile")),
            (pathlib.Path, ("exists", "is_file")),
        ):
            for name in names:
                patches.wrap(owner, name, self._look)
        patches.replace_aliases()

    def _look(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
        found = bool(original(path, *args, **kwargs))
        source = _user_frame(sys._getframe(2))
        if source is not None and isinstance(path, (str, os.PathLike)):
            file = pathlib.Path(path)
            if not file.is_dir():
                self.looks.setdefault(str(file.absolute()), FileLook(found, source))
        return found


def changing(looks: Sequence[Mapping[str, FileLook]]) -> list[Frame]:
    """Return the lines that found a file on some ranks only: others wrote it in between."""
    by_path: dict[str, list[FileLook]] = {}
    for own in looks:
        for path, look in own.items():
            by_path.setdefault(path, []).append(look)
    apart = [same for same in by_path.values() if len({look.found for look in same}) > 1]
    return list(dict.fromkeys(same[0].frame for same in apart))


def _user_frame(frame: FrameType | None) -> Frame | None:
    """Return the line of the user that called, if no library is in between."""
    while frame is not None and kind_of_file(frame.f_code.co_filename) is FrameKind.PYTHON:
        frame = frame.f_back
    if frame is None or kind_of_file(frame.f_code.co_filename) is not FrameKind.USER:
        return None
    code = frame.f_code
    return Frame(code.co_filename, frame.f_lineno, code.co_name, FrameKind.USER)
