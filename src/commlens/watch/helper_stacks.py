"""The processes that this node's ranks started and that have a process group of their own, with
their stacks: nothing records their calls, and ranks may wait for them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from commlens.blackbox import rank_claims
from commlens.model.collective import Stack
from commlens.model.frames import frame_kind
from commlens.model.ranklog import HelperProcess, Observation
from commlens.processes import pyspy
from commlens.watch.roster import Member

_AT_ONCE: Final = 4
_MOST: Final = 32  # processes of a node
_FRESH_S: Final = 3.0
_TIMEOUT_S: Final = 2.0  # of each py-spy
_NEVER: Final[tuple[float, Stack]] = (-math.inf, ())  # not read yet


class HelperStacks:
    """Reads these stacks with py-spy, and keeps each for a few seconds."""

    def __init__(self) -> None:
        self._known: dict[rank_claims.RankClaim, tuple[float, Stack]] = {}

    def add(self, members: Iterable[Member], observations: Mapping[int, Observation]) -> None:
        """Add the processes to the observations, which are by the pids of the ranks that started
        them.
        """
        ranks = {
            member.pid: member.box.path.parent
            for member in members
            if member.alive
            and member.here
            and member.box is not None
            and member.pid in observations
        }
        claims = [claim for folder in set(ranks.values()) for claim in _claims_in(folder, ranks)]
        oldest = time.monotonic() - _FRESH_S
        self._known = {claim: self._known[claim] for claim in claims if claim in self._known}
        self._look([each for each in claims[:_MOST] if self._known.get(each, _NEVER)[0] <= oldest])
        for pid in ranks:
            observations[pid].helpers = [
                HelperProcess(claim.pid, claim.group, self._known.get(claim, _NEVER)[1])
                for claim in claims
                if claim.started_by == pid
            ]

    def _look(self, claims: list[rank_claims.RankClaim]) -> None:
        if not claims or pyspy.find() is None:
            return
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="commlens-helpers") as pool:
            for claim, stack in zip(claims, pool.map(_stack_of, claims), strict=True):
                self._known[claim] = time.monotonic(), stack


def _claims_in(folder: Path, ranks: Mapping[int, Path]) -> list[rank_claims.RankClaim]:
    """Return the claims of living processes that these ranks started."""
    with contextlib.suppress(OSError):
        children = rank_claims.of_children(folder)
        return [claim for pid in ranks for claim in children.get(pid, ())]
    return []


def _stack_of(claim: rank_claims.RankClaim) -> Stack:
    seen = pyspy.take(claim.pid, partial(frame_kind, prefixes=[]), timeout_s=_TIMEOUT_S)
    return seen.threads[0].stack.frames if seen.threads else ()
