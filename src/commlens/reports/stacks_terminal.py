"""The merged stacks of all ranks on a terminal: the classes with the fewest ranks first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from commlens.model.collective import Frame
from commlens.model.frames import FrameKind
from commlens.model.stack_classes import StackClass
from commlens.model.wrapping import unbroken
from commlens.reports.console import print_parts
from commlens.text import capital, count, ranks_phrase

_MOST_FRAMES = 24
_MOST_CLASSES = 20
_NAME_MAX = 80  # of a C++ function: templates make them very long


def print_classes(
    classes: Sequence[StackClass], *, most: int = _MOST_CLASSES, whole: bool = False
) -> None:
    """Print classes of stacks, innermost frame first.

    Args:
        classes: from merge_stacks.
        most: how many of them.
        whole: all frames; otherwise those of torch and Python only below the user's code.
    """
    parts: list[RenderableType] = []
    for each in classes[:most]:
        parts += [*([""] if parts else []), *_class(each, whole=whole)]
    if len(classes) > most:
        parts += [
            "",
            Text(
                f"{count(len(classes) - most, 'more class', 'more classes')} of stacks; --all shows"
                " them."
            ),
        ]
    print_parts(parts)


def class_lines(each: StackClass, *, whole: bool = False) -> list[str]:
    """Return one class as lines: the ranks, then a line for each frame."""
    state = f", {each.state}" if each.state else ""
    number = f" ({len(each.ranks)} ranks)" if len(each.ranks) > 2 else ""
    head = f"{capital(ranks_phrase(each.ranks))}{number}{state}"
    frames = list(each.frames) if whole else each.shown
    lines = [_frame_line(frame) for frame in frames]
    if len(lines) > _MOST_FRAMES and not whole:
        lines[_MOST_FRAMES:] = [f"... {len(lines) - _MOST_FRAMES} more"]
    return [head, *(lines or [f"no stack: {each.note}"]), *(f"also {text}" for text in each.others)]


def _class(each: StackClass, *, whole: bool) -> list[RenderableType]:
    head, *lines = class_lines(each, whole=whole)
    return [
        Text(head, style="bold"),
        *(Padding(Text(unbroken(line), overflow="fold"), (0, 0, 0, 2)) for line in lines),
    ]


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
