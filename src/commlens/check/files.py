"""Note the files that a program looks for, and whether it finds them.

The ranks of a fake world run one after another. So a rank may find a file that another rank has
written, such as a checkpoint, where in a real job all ranks find it, or none. A line at which ranks
found different files (:func:`lines_of_changed_files`) is a guess of the check.
"""

from __future__ import annotations

import builtins
import contextlib
import glob
import io
import os
import pathlib
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from commlens.check.sequence import FileLookup
from commlens.model.collective import Frame
from commlens.model.frames import FrameKind
from commlens.model.grouping import grouped
from commlens.tap.running_frames import frame_of, kind_of_file
from commlens.tracing.patches import Patches

_PASSED_OVER = (FrameKind.PYTHON, FrameKind.TORCH)
"""Code that may stand between the user's line and the call that looks for a file, as ``torch.load``
does. Other libraries look for files of their own, such as caches, which are left out.
"""


class _ThreadFiles(threading.local):
    is_looking = False  # this thread is inside of a lookup


class Files:
    """Notes which files the program looks for, and which it finds."""

    def __init__(self) -> None:
        self.lookups: dict[str, FileLookup] = {}
        """The first one of each path or pattern."""
        self._here = _ThreadFiles()

    def install(self, patches: Patches) -> None:
        """Wrap the functions that look for files, list them, or open them for reading."""
        for owner, names, instead in (
            (os.path, ("exists", "isfile"), self._look),
            (pathlib.Path, ("exists", "is_file"), self._look),
            (os, ("listdir", "scandir"), self._list),
            (pathlib.Path, ("iterdir",), self._list),
            (glob, ("glob", "iglob"), self._match),
            (pathlib.Path, ("glob", "rglob"), self._match),
            (builtins, ("open",), self._open),
            (io, ("open",), self._open),
        ):
            for name in names:  # Python 3.13 has some methods of Path in a base class
                bases = getattr(owner, "__mro__", ())
                patches.wrap(next((b for b in bases if name in b.__dict__), owner), name, instead)
        patches.replace_aliases()

    # Each of these stands in for functions of Python: it calls the original and notes the result.

    def _look(self, original: Any, path: Any, *args: Any, **kwargs: Any) -> bool:
        found = bool(original(path, *args, **kwargs))
        self._note(path, int(found))
        return found

    def _open(self, original: Any, path: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if mode not in ("r", "rb", "rt"):
            return original(path, mode, *args, **kwargs)
        try:
            opened = original(path, mode, *args, **kwargs)
        except FileNotFoundError:
            self._note(path, 0)
            raise
        self._note(path, 1)
        return opened

    def _list(self, original: Any, path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not self._here.is_looking:
            names: list[str] = []
            # a listing of its own, since scandir and iterdir return iterators
            with contextlib.suppress(OSError), self._looking():
                names = os.listdir(path)  # noqa: PTH208 - it may be a file descriptor
            self._note(path, _checksum(names), "/*")
        with self._looking():
            return original(path, *args, **kwargs)

    def _match(self, original: Any, path: Any, *pattern: Any, **kwargs: Any) -> Any:
        """Note the files that ``glob.glob(pattern)`` or ``path.glob(pattern)`` finds."""
        with self._looking():
            found = list(original(path, *pattern, **kwargs))
        of_path, name = isinstance(path, pathlib.Path), original.__name__
        self._note(path, _checksum(found), f"/{name} {pattern} {kwargs}" if of_path else "")
        return iter(found) if of_path or name == "iglob" else found

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Leave out the lookups that Python makes inside of another one: glob calls scandir."""
        outer, self._here.is_looking = self._here.is_looking, True
        try:
            yield
        finally:
            self._here.is_looking = outer

    def _note(self, path: Any, found: int, below: str = "") -> None:
        if self._here.is_looking or not isinstance(path, (str, os.PathLike)):
            return
        # _note <- _look, _open, _list or _match <- the wrapper of Patches <- the caller
        source = _asking_line(sys._getframe(3))
        if source is None:
            return
        # A path that cannot be looked up, such as one that is too long, is a file on no rank. A
        # directory matters only by what it holds.
        with self._looking(), contextlib.suppress(OSError):
            file = pathlib.Path(path).absolute()
            if below or not file.is_dir():
                self.lookups.setdefault(f"{file}{below}", FileLookup(found, source))


def lines_of_changed_files(lookups: Sequence[Mapping[str, FileLookup]]) -> list[Frame]:
    """Return the lines that found different files on some ranks, because other ranks had written
    them in between.

    Args:
        lookups: of each rank, by path.
    """
    by_path = grouped((path, lookup) for own in lookups for path, lookup in own.items())
    differ = [same for same in by_path.values() if len({lookup.found for lookup in same}) > 1]
    return list(dict.fromkeys(same[0].frame for same in differ))


def _checksum(names: Iterable[Any]) -> int:
    return zlib.crc32("\n".join(sorted(map(os.fsdecode, names))).encode(errors="replace"))


def misses_a_file(error: BaseException | None) -> bool:
    """Return whether an exception, or one that led to it, is due to a file that does not exist."""
    while error is not None and not isinstance(error, FileNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None


def _asking_line(frame: FrameType | None) -> Frame | None:
    """Return the line of the user that called, if no library is in between."""
    while frame is not None and kind_of_file(frame.f_code.co_filename) in _PASSED_OVER:
        if "importlib" in frame.f_code.co_filename:
            return None
        frame = frame.f_back
    if frame is None or kind_of_file(frame.f_code.co_filename) is not FrameKind.USER:
        return None
    return frame_of(frame.f_code, frame.f_lineno)
