"""Collect the latent faults of this process while it runs, and write them at its end: Works that
were never waited for, buffers touched before the wait, calls on groups that the rank is not in,
groups that pile up.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.tap.made_groups import MadeGroups

if TYPE_CHECKING:
    from commlens.model.collective import Stack
    from commlens.model.hazard import Hazard, HazardKind

log = logging.getLogger("commlens")

_FOUND_MAX: Final = 64  # stacks in a box
_OF_BUFFERS_MAX: Final = 16
_PRINTED_MAX: Final = 5
_OPEN_MAX: Final = 4096


class CountedHazard(NamedTuple):
    """A hazard of which only the number of calls and their stack's place in the box are known."""

    what: HazardKind
    times: int
    position: int  # of the stack in the box
    group: str = ""  # of "many-groups": its ranks


class PlacedHazard(NamedTuple):
    """A hazard, and the position of its stack in the box."""

    hazard: Hazard
    position: int


class Unwaited:
    """The Works of asynchronous calls that the program has not waited for, and whose state or
    future it has not asked for.

    They are known by the ``id`` of their Python object, and are not kept alive: when another Work
    has the same id, the former one is freed, and can be waited for no more.
    """

    def __init__(self) -> None:
        # positions of the calls' stacks in the box
        self.open: dict[int, int] = {}  # by the Work's id
        self.freed: Counter[int] = Counter()

    def issued(self, work: Any, position: int) -> None:
        """Note that an asynchronous call, with its stack at this position, returned ``work``."""
        key = id(work)
        former = self.open.get(key)
        if former is not None:
            self.freed[former] += 1
        elif len(self.open) >= _OPEN_MAX:
            return
        self.open[key] = position

    def found(self) -> Counter[int]:
        """Return the number of Works that were never waited for, by their stack's position."""
        return self.freed + Counter(self.open.values())


class Hazards:
    """The hazards of this process."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.of_buffers: Callable[[], list[Hazard]] = list  # set if a BufferWatch runs
        self._not_a_member: Counter[int] = Counter()  # calls, by their stack's position
        self._groups = MadeGroups()

    def not_a_member(self) -> None:
        """Note a call with a group that this rank is not in; torch warns of it and does nothing."""
        self._not_a_member[self._callers_position()] += 1

    def group_made(self, ranks: Any) -> None:
        """Note that a group was made."""
        self._groups.note(self._callers_position(), ranks)

    def _callers_position(self) -> int:
        return int(self._recorder.stacks.position(sys._getframe(2)))

    def report(self, folder: Path) -> None:
        """Write all into the box, and log those that no other rank of this node has logged."""
        counted = self._counted()
        of_buffers = self.of_buffers()
        if not counted and not of_buffers:
            return
        # These need msgspec, which recording does without.
        from commlens.blackbox.reader import OpenBox
        from commlens.model.hazard import Hazard

        writer = self._recorder.writer
        with OpenBox(writer.path) as box:
            stacks = box.stacks({each.position for each in counted})
        found = [
            PlacedHazard(each, self._write(each.stack)) for each in of_buffers[:_OF_BUFFERS_MAX]
        ]
        for what, times, position, group in counted:
            found.append(PlacedHazard(Hazard(what, times, stacks[position] or (), group), position))
        hazards = _joined_by_line(found)
        if hazards:
            records = [self._as_record(*each) for each in hazards[:_FOUND_MAX]]
            writer.word(L.HAZARDS, writer.add_blob({"k": "hazards", "found": records}))
        for hazard, _ in hazards[:_PRINTED_MAX]:
            _log_once(folder, hazard)

    def _counted(self) -> list[CountedHazard]:
        never_waited = sorted(self._recorder.unwaited_works().items())
        return [
            *(CountedHazard("never-waited", times, position) for position, times in never_waited),
            *(
                CountedHazard("not-a-member", n, position)
                for position, n in self._not_a_member.items()
            ),
            *(CountedHazard("many-groups", g.times, g.maker, g.ranks) for g in self._groups.many()),
        ]

    def _as_record(self, hazard: Hazard, position: int) -> dict[str, Any]:
        touch = hazard.touch
        return {
            "what": hazard.what,
            "times": hazard.times,
            "stack": position,
            "group": hazard.group,
            "touch": touch
            and {
                "op": touch.op,
                "access": touch.access,
                "operand": touch.operand,
                "tensor": touch.tensor,
                "stack": self._write(touch.stack),
            },
        }

    def _write(self, stack: Stack) -> int:
        frames = [[frame.file, frame.line, frame.function] for frame in stack]
        return int(self._recorder.writer.add_blob({"k": "stack", "f": frames}))


def _joined_by_line(found: list[PlacedHazard]) -> list[PlacedHazard]:
    """Join the hazards of each line. A line may have several stacks: a dispatch mode adds frames
    while it is on.
    """
    from msgspec.structs import replace

    joined: dict[Any, PlacedHazard] = {}
    for hazard, position in found:
        if hazard.source is not None:
            key = hazard.lines, hazard.group
            before = joined[key].hazard.times if key in joined else 0
            joined[key] = PlacedHazard(replace(hazard, times=before + hazard.times), position)
    return list(joined.values())


def _log_once(folder: Path, hazard: Hazard) -> None:
    """Log a hazard, if this process is the first of the node to do so."""
    from commlens.text import hazard_phrase

    name = " ".join(map(str, hazard.lines))
    with contextlib.suppress(OSError):
        if not job_dirs.claim(folder / f"hazard.{zlib.crc32(name.encode()):08x}"):
            return
    log.warning("commlens: %s", hazard_phrase(hazard))
