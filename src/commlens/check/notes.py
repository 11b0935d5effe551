"""What is noted of a rank's run: its events, its guesses, and what the run does not show."""

from __future__ import annotations

import functools
import itertools
import sys
import traceback
from types import FrameType, TracebackType

from commlens.check.sequence import Event, Guess, GuessKind, RankSequence, Unseen, UnseenKind
from commlens.model.collective import Stack, user_frame
from commlens.model.frames import FrameKind
from commlens.tap.running_frames import frame_of

_frame = functools.cache(frame_of)


class RankNotes:
    """Fills the sequence of one rank."""

    def __init__(self, sequence: RankSequence) -> None:
        self.sequence = sequence
        self._stacks: dict[Stack, Stack] = {}  # shared, so that they are written only once

    def add(self, event: Event) -> None:
        """Add an event, unless the run has ended and only the program's exit handlers run."""
        if not self.sequence.cut_off:
            self.sequence.events.append(event)

    def guess(self, what: GuessKind) -> None:
        """Note that the program asked for a value that this rank alone cannot know."""
        self.sequence.guesses.append(Guess(what, self.stack(), len(self.sequence.events)))

    def note_unseen(self, what: UnseenKind, name: str = "") -> None:
        """Note, once for each line, what a real run does there and this one does not."""
        unseen = Unseen(what, user_frame(self.stack()), name)
        if unseen not in self.sequence.unseen:
            self.sequence.unseen.append(unseen)

    def stack(self) -> Stack:
        """Return the stack of the calling thread."""
        return self.stack_of_frame(sys._getframe(1))

    def stack_of_frame(self, frame: FrameType | None) -> Stack:
        """Return the stack whose innermost frame this is, without the frames of commlens in
        front.
        """
        callers = traceback.walk_stack(frame) if frame is not None else ()
        frames = (_frame(each.f_code, line) for each, line in callers)
        stack = tuple(itertools.dropwhile(lambda each: each.kind is FrameKind.COMMLENS, frames))
        return self._stacks.setdefault(stack, stack)


def stack_of_traceback(trace: TracebackType | None) -> Stack:
    """Return the stack at which an exception was raised, innermost first."""
    frames = [_frame(each.f_code, line) for each, line in traceback.walk_tb(trace)]
    return tuple(reversed(frames))
