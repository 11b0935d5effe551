"""The stacks of all ranks on a terminal: ranks whose main threads stand at the same place form a
class, and the classes with the fewest ranks come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from commlens.model.collective import Frame, Stack
from commlens.model.frames import FrameKind
from commlens.model.ranklog import UNREMARKABLE, RankLog
from commlens.model.wrapping import unbroken
from commlens.reports.console import print_parts
from commlens.text import capital, count, process_phrase, rank_phrase, ranks_phrase

_MOST_FRAMES = 24
_MOST_CLASSES = 20
_NAME_MAX = 80  # of a C++ function: templates make them very long


class StackRow(msgspec.Struct, frozen=True):
    """Ranks whose main threads stand at the same place."""

    ranks: list[int]
    frames: Stack  # innermost first
    state: str = ""  # of their processes, in words
    note: str = ""  # why there is no stack
    # other threads that run the user's code: "rank 2, Thread-3: train.py:57 load_batch"
    others: list[str] = []

    @property
    def shown(self) -> list[Frame]:
        """The frames worth showing: without commlens's own, and of torch and Python only the
        innermost ones.
        """
        inner = True
        found: list[Frame] = []
        for frame in self.frames:
            if frame.kind in (FrameKind.USER, FrameKind.LIBRARY):
                inner = False
                found.append(frame)
            elif (
                inner
                and frame.kind is not FrameKind.COMMLENS
                and not frame.function.endswith("wrapper")
            ):
                found.append(frame)
        return found


def merge_stacks(logs: Sequence[RankLog]) -> list[StackRow]:
    """Group ranks by the stack of their main thread, and by the state of their process if it
    explains why they do not move. The classes with the fewest ranks come first.
    """
    found: dict[tuple[object, ...], list[tuple[RankLog, Stack, str]]] = {}
    for log in logs:
        main, seen = log.main_stack, log.observation
        frames = main.frames if main is not None else ()
        note = "" if frames else seen.stacks_note or "it has no Python stack"
        state = "" if seen.state in UNREMARKABLE else process_phrase(seen)
        # C++ frames hold addresses, and commlens's own differ between equal ranks, too
        place = tuple(
            (frame.file, frame.line, frame.function)
            for frame in frames
            if frame.kind not in (FrameKind.COMMLENS, FrameKind.NATIVE)
        )
        found.setdefault((place, state, note), []).append((log, frames, note))
    classes = [
        StackRow(
            sorted(log.rank for log, _, _ in members),
            members[0][1],
            str(key[1]),
            members[0][2],
            _other_threads(log for log, _, _ in members),
        )
        for key, members in found.items()
    ]
    return sorted(classes, key=lambda each: (len(each.ranks), each.ranks))


def _other_threads(logs: Iterable[RankLog]) -> list[str]:
    found: dict[str, None] = {}
    for log in logs:
        main = log.main_stack
        for stack in [*log.observation.stacks, *log.stacks]:
            line = next((frame for frame in stack.frames if frame.kind is FrameKind.USER), None)
            if (
                line is not None
                and not stack.is_main
                and (main is None or stack.thread != main.thread)
            ):
                text = (
                    f"{rank_phrase(log.rank)}, {stack.name or f'thread {stack.thread}'}:"
                    f" {line.where} {line.function}"
                )
                found[text] = None
    return list(found)[:8]


def print_classes(
    classes: Sequence[StackRow], *, most: int = _MOST_CLASSES, whole: bool = False
) -> None:
    """Print classes of stacks, innermost frame first.

    Args:
        classes: from merge_stacks.
        most: how many of them.
        whole: all frames; otherwise those of torch and Python only below the user's code.
    """
    parts: list[RenderableType] = []
    for each in classes[:most]:
        head, *lines = class_lines(each, whole=whole)
        parts += [*([""] if parts else []), Text(head, style="bold")]
        parts += [Padding(Text(unbroken(line), overflow="fold"), (0, 0, 0, 2)) for line in lines]
    if len(classes) > most:
        parts += [
            "",
            Text(
                f"{count(len(classes) - most, 'more class', 'more classes')} of stacks; --all shows"
                " them."
            ),
        ]
    print_parts(parts)


def class_lines(each: StackRow, *, whole: bool = False) -> list[str]:
    """Return one class as lines: the ranks, then a line for each frame."""
    state = f", {each.state}" if each.state else ""
    number = f" ({len(each.ranks)} ranks)" if len(each.ranks) > 2 else ""
    head = f"{capital(ranks_phrase(each.ranks))}{number}{state}"
    frames = list(each.frames) if whole else each.shown
    lines = [_frame_line(frame) for frame in frames]
    if len(lines) > _MOST_FRAMES and not whole:
        lines[_MOST_FRAMES:] = [f"... {len(lines) - _MOST_FRAMES} more"]
    return [head, *(lines or [f"no stack: {each.note}"]), *(f"also {text}" for text in each.others)]


def _frame_line(frame: Frame) -> str:
    if frame.kind is FrameKind.NATIVE:
        name = (
            frame.function
            if len(frame.function) <= _NAME_MAX
            else f"{frame.function[:_NAME_MAX]}..."
        )
        return f"{name}  {frame.file.rpartition('/')[2]}" + (f":{frame.line}" if frame.line else "")
    return (
        f"{frame.function} "
        f" {frame.file if frame.kind is FrameKind.USER else _short(frame.file)}:{frame.line}"
    )


def _short(file: str) -> str:
    """Return a library's file without the folder that it is installed in."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    return file.rpartition("/lib/")[2] if "/lib/python" in file else file
