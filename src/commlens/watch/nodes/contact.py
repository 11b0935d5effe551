"""The places where the nodes of a job may meet, and whether the present one answers: how a store is
lost, and found again or given up for the next place.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from commlens.watch.nodes.beat import Beat
from commlens.watch.nodes.meeting_places import Place


class LostStore(NamedTuple):
    """The store in which the nodes met, and which they no longer reach."""

    place: Place
    silent_s: float
    refuses: bool  # connections are refused: the process that served it has ended
    beats: list[Beat]  # of the nodes that are out of sight without it


class Contact:
    """The meeting places, and which of them answered when. Not safe for threads.

    Moments are ``time.monotonic()``; 0.0: not yet.
    """

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        """Where the nodes may meet; the first is where they do."""
        self.given_up: list[Place] = []
        """Places before it, which did not answer."""
        self.has_joined = False
        """A rank of this node has passed ``init_process_group``."""
        self.answered_at = 0.0
        """The moment of the last answer."""
        self.refuses = False
        """The present place refuses connections."""
        self.lost_since = 0.0
        """The moment of the first error since the last answer, or in a place that was given up."""
        self.lost_refused = False
        """That error, or a later one, was a refused connection."""

    @property
    def lost_place(self) -> Place:
        """The place that was lost first, if any was."""
        return (self.given_up or self.places)[0]

    def is_lost(self, after_s: float) -> bool:
        """Return whether the place refuses connections, or has been silent for this long."""
        return self.refuses or time.monotonic() - self.answered_at > after_s

    def note_answer(self, now: float) -> None:
        """Note that the place answers."""
        self.answered_at, self.refuses = now, False
        if not self.given_up:
            self.lost_since, self.lost_refused = 0.0, False

    def note_error(self, error: OSError) -> None:
        """Note that the place does not answer, if one ever did. Before that, and before a rank here
        has joined, rank 0 may not have made the store yet.
        """
        if self.answered_at and self.has_joined:
            self.lost_since = self.lost_since or time.monotonic()
            if isinstance(error, ConnectionRefusedError):  # its process has ended: it did serve
                self.refuses = self.lost_refused = True
