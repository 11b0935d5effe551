"""Which collectives are compared if not all of them are.

All collectives are announced, so a rank that compares one always finds the other ranks'
announcements. The choice follows from the sequence number and from the rank's own past: in a
program whose ranks agree, all of them choose the same without communicating.
"""

from __future__ import annotations

from typing import Final

EVERY: Final = 16
"""One in this many collectives of a channel is compared. A board keeps this many announcements of a
channel.
"""

_SITES: Final = 10_000


class CallSampler:
    """Chooses every 16th collective of each channel, and the first with the same arguments from the
    same place in the program.
    """

    def __init__(self) -> None:
        self._sites: set[tuple[int, int]] = set()

    def skips(self, args: object, stack: int, number: int) -> bool:
        """Return whether a collective is not compared.

        Args:
            args: its arguments, one object for all collectives that have the same.
            stack: position of the stack that issues it.
            number: of the collective, in its channel.
        """
        site = (id(args), stack)
        if site not in self._sites:
            if len(self._sites) > _SITES:
                self._sites.clear()
            self._sites.add(site)
            return False
        return number % EVERY != 0
