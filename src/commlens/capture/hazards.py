"""Collect the latent faults of this process while it runs, and write them at its end: Works that
were never waited for, calls on groups that the rank is not in, groups that pile up.
"""

from __future__ import annotations

import logging
import os
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commlens.blackbox import layout as L

if TYPE_CHECKING:
    from commlens.model.hazard import HazardKind

log = logging.getLogger("commlens")

_FOUND_MAX: Final = 64  # stacks in a box
_PRINTED_MAX: Final = 5
_OPEN_MAX: Final = 4096
_MANY_GROUPS: Final = 16  # of the same ranks, alive, made by one line


class Unwaited:
    """The Works of asynchronous calls for which nobody has waited, nor asked for a state or future.

    They are known by the ``id`` of their Python object, so none is kept alive: when another Work
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
        """Return how many were never waited for, by stack."""
        return self.freed + Counter(self.open.values())


class Hazards:
    """The hazards of this process."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._not_a_member: Counter[int] = Counter()
        self._groups: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def not_a_member(self) -> None:
        """Note a call with a group that this rank is not in; torch warns of it and does nothing."""
        self._not_a_member[self._stack()] += 1

    def group_made(self, ranks: Any) -> None:
        """Note that a group was made."""
        self._groups[self._stack(), tuple(ranks)] += 1

    def _stack(self) -> int:
        return int(self._recorder.stacks.position(sys._getframe(2)))

    def report(self, folder: Path) -> None:
        """Write all into the box, and log those that no other rank of this node has logged."""
        candidates: list[tuple[HazardKind, int, int, str]] = [
            ("never-waited", times, stack, "")
            for stack, times in self._recorder.unwaited_works().items()
        ]
        candidates += [
            ("not-a-member", times, stack, "") for stack, times in self._not_a_member.items()
        ]
        candidates += [
            ("many-groups", times, stack, _ranks_text(ranks))
            for (stack, ranks), times in self._groups.items()
            if times >= _MANY_GROUPS and _alive(ranks) >= _MANY_GROUPS
        ]
        if not candidates:
            return
        # These need msgspec, which recording does without.
        from commlens.blackbox.reader import OpenBox
        from commlens.model.hazard import Hazard
        from commlens.text import hazard_phrase

        writer = self._recorder.writer
        with OpenBox(writer.path) as box:
            stacks = box.stacks({stack for _, _, stack, _ in candidates})
        found: list[dict[str, Any]] = []
        for what, times, stack, group in candidates:
            hazard = Hazard(what, times, stacks[stack] or (), group)
            if hazard.source is None or len(found) >= _FOUND_MAX:
                continue
            found.append({"what": what, "times": times, "stack": stack, "group": group})
            if len(found) <= _PRINTED_MAX and _claim(folder, f"{what} {hazard.source}"):
                log.warning("commlens: %s", hazard_phrase(hazard))
        if found:
            writer.word(L.HAZARDS, writer.add_blob({"k": "hazards", "found": found}))


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{min(ranks)}-{max(ranks)}"


def _alive(ranks: tuple[int, ...]) -> int:
    from torch.distributed import distributed_c10d as c10d

    wanted = sorted(ranks)
    return sum(sorted(of) == wanted for of in c10d._world.pg_group_ranks.values())


def _claim(folder: Path, name: str) -> bool:
    """Return whether this process is the first of the node to log a hazard."""
    path = folder / f"hazard.{zlib.crc32(name.encode()):08x}"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
