"""The stacks of all ranks, merged: ranks whose main threads stand at the same place form a
class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from commlens.model.collective import Frame, Stack
from commlens.model.frames import FrameKind
from commlens.model.ranklog import RankLog


class StackClass(msgspec.Struct, frozen=True):
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


def merge_stacks(logs: Sequence[RankLog], states: Sequence[str]) -> list[StackClass]:
    """Group ranks by the stack of their main thread and their state. The classes with the fewest
    ranks come first.

    Args:
        logs: the ranks.
        states: of their processes in words, such as "stopped"; ranks in different states are in
            different classes.
    """
    found: dict[tuple[object, ...], list[tuple[RankLog, Stack, str]]] = {}
    for log, state in zip(logs, states, strict=True):
        main = log.main_stack
        frames = main.frames if main is not None else ()
        note = "" if frames else log.observation.stacks_note or "it has no Python stack"
        found.setdefault((_key(frames), state, note), []).append((log, frames, note))
    classes = [
        StackClass(
            sorted(log.rank for log, _, _ in members),
            members[0][1],
            str(key[1]),
            members[0][2],
            _others(log for log, _, _ in members),
        )
        for key, members in found.items()
    ]
    return sorted(classes, key=lambda each: (len(each.ranks), each.ranks))


def _key(frames: Stack) -> tuple[object, ...]:
    """Return the frames that decide: addresses in C++ frames and commlens's own frames differ
    between equal ranks.
    """
    return tuple(
        (frame.file, frame.line, frame.function)
        for frame in frames
        if frame.kind not in (FrameKind.COMMLENS, FrameKind.NATIVE)
    )


def _others(logs: Iterable[RankLog]) -> list[str]:
    found: list[str] = []
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
                    f"rank {log.rank}, {stack.name or f'thread {stack.thread}'}: {line.where}"
                    f" {line.function}"
                )
                if text not in found:
                    found.append(text)
    return found[:8]
