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
from typing import TYPE_CHECKING, Any, Final

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


class Unwaited:
    """The Works of asynchronous calls that the program has not waited for, and whose state or
    future it has not asked for.

    They are known by the ``id`` of their Python object, and are not kept alive: when another Work
    has the same id, the former one is freed, and can be waited for no more.
    """

    def __init__(self) -> None:
        self.open: dict[int, int] = {}  # by id: the position of the stack
        self.freed: Counter[int] = Counter()

    def issued(self, work: Any, stack: int) -> None:
        """Note that an asynchronous call returned ``work``."""
        key = id(work)
        former = self.open.get(key)
        if former is not None:
            self.freed[former] += 1
        elif len(self.open) >= _OPEN_MAX:
            return
        self.open[key] = stack

    def found(self) -> Counter[int]:
        """Return the number of Works that were never waited for, by stack."""
        return self.freed + Counter(self.open.values())


class Hazards:
    """The hazards of this process."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.of_buffers: Callable[[], list[Hazard]] = list  # set if a BufferWatch runs
        self._not_a_member: Counter[int] = Counter()
        self._groups = MadeGroups()

    def not_a_member(self) -> None:
        """Note a call with a group that this rank is not in; torch warns of it and does nothing."""
        self._not_a_member[self._stack()] += 1

    def group_made(self, ranks: Any) -> None:
        """Note that a group was made."""
        self._groups.note(self._stack(), ranks)

    def _stack(self) -> int:
        return int(self._recorder.stacks.position(sys._getframe(2)))

    def report(self, folder: Path) -> None:
        """Write all into the box, and log those that no other rank of this node has logged."""
        candidates: list[tuple[HazardKind, int, int, str]] = [
            ("never-waited", times, stack, "")
            for stack, times in sorted(self._recorder.unwaited_works().items())
        ]
        candidates += [
            ("not-a-member", times, stack, "") for stack, times in self._not_a_member.items()
        ]
        candidates += [
            ("many-groups", many.times, many.maker, many.ranks) for many in self._groups.many()
        ]
        of_buffers = self.of_buffers()
        if not candidates and not of_buffers:
            return
        # These need msgspec, which recording does without.
        from commlens.blackbox.reader import OpenBox
        from commlens.model.hazard import Hazard

        writer = self._recorder.writer
        with OpenBox(writer.path) as box:
            stacks = box.stacks({stack for _, _, stack, _ in candidates})
        written = [(each, self._written(each.stack)) for each in of_buffers[:_OF_BUFFERS_MAX]]
        written += [
            (Hazard(what, times, stacks[stack] or (), group), stack)
            for what, times, stack, group in candidates
        ]
        hazards = _by_line(written)
        found = [
            {
                "what": hazard.what,
                "times": hazard.times,
                "stack": stack,
                "group": hazard.group,
                "touch": self._touch(hazard),
            }
            for hazard, stack in hazards[:_FOUND_MAX]
        ]
        if found:
            writer.word(L.HAZARDS, writer.add_blob({"k": "hazards", "found": found}))
        for hazard, _ in hazards[:_PRINTED_MAX]:
            _log_once(folder, hazard)

    def _touch(self, hazard: Hazard) -> dict[str, Any] | None:
        touch = hazard.touch
        if touch is None:
            return None
        return {
            "op": touch.op,
            "access": touch.access,
            "operand": touch.operand,
            "tensor": touch.tensor,
            "stack": self._written(touch.stack),
        }

    def _written(self, stack: Stack) -> int:
        frames = [[frame.file, frame.line, frame.function] for frame in stack]
        return int(self._recorder.writer.add_blob({"k": "stack", "f": frames}))


def _by_line(found: list[tuple[Hazard, int]]) -> list[tuple[Hazard, int]]:
    """Join the hazards of each line. A line may have several stacks: a dispatch mode adds frames
    while it is on.
    """
    from msgspec.structs import replace

    merged: dict[Any, tuple[Hazard, int]] = {}
    for hazard, stack in found:
        if hazard.source is not None:
            key = hazard.lines, hazard.group
            earlier = merged.get(key)
            times = hazard.times + (earlier[0].times if earlier is not None else 0)
            merged[key] = replace(hazard, times=times), stack
    return list(merged.values())


def _log_once(folder: Path, hazard: Hazard) -> None:
    """Log a hazard, if this process is the first of the node to do so."""
    from commlens.text import hazard_phrase

    name = " ".join(map(str, hazard.lines))
    with contextlib.suppress(OSError):
        if not job_dirs.claim(folder / f"hazard.{zlib.crc32(name.encode()):08x}"):
            return
    log.warning("commlens: %s", hazard_phrase(hazard))
