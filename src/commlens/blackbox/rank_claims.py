"""Record which processes that ranks started claim a rank of their own, to find ranks that exist
twice, and processes that ranks may wait for. A claim is an empty file beside the black boxes, whose
name holds its fields.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from commlens.blackbox import job_dirs
from commlens.model.grouping import grouped

NAME: Final = re.compile(r"\.claim-(\d{1,9})-([0-9a-f]{8})-(\d{1,10})-(\d{1,20})-(\d{1,10})")


class RankClaim(NamedTuple):
    """A process that calls ``init_process_group`` with a rank, and that a rank of the launcher
    started.
    """

    rank: int
    group: str  # digest of the address where the ranks meet and of the world size
    pid: int
    start_ticks: int
    started_by: int  # pid of the rank that started it


def claim_rank(
    folder: Path, rank: int, meeting: str, world_size: int, started_by: int
) -> RankClaim:
    """Write this process's claim into a job's folder, and return it."""
    group = hashlib.sha256(f"{meeting}|{world_size}".encode()).hexdigest()[:8]
    claim = RankClaim(rank, group, os.getpid(), job_dirs.start_ticks(os.getpid()), started_by)
    (folder / f".claim-{'-'.join(map(str, claim))}").touch(mode=0o600)
    return claim


def twins(folder: Path) -> dict[int, list[RankClaim]]:
    """Return the claims of each rank that exists twice, oldest first: its claims are for the same
    group, but different ranks of the launcher started the processes.

    Claims of an earlier run do not count. They are those whose starter has no box any more.
    """
    launched = {job_dirs.box_pid(box) for box in job_dirs.boxes(folder)}
    found: dict[tuple[int, str], dict[int, RankClaim]] = {}
    for claim in sorted(_claims(folder), key=lambda one: (one.start_ticks, one.pid)):
        if claim.started_by in launched:
            found.setdefault((claim.rank, claim.group), {}).setdefault(claim.started_by, claim)
    return {
        rank: list(by_starter.values())
        for (rank, _), by_starter in sorted(found.items())
        if len(by_starter) > 1
    }


def of_children(folder: Path) -> dict[int, list[RankClaim]]:
    """Return the claims of the processes that still live, by the pid of the rank that started
    them.
    """
    return grouped(
        (claim.started_by, claim)
        for claim in sorted(_claims(folder))
        if not job_dirs.process_has_ended(claim.pid, claim.start_ticks)
    )


def _claims(folder: Path) -> Iterable[RankClaim]:
    for name in os.listdir(folder):  # noqa: PTH208
        if match := NAME.fullmatch(name):
            yield RankClaim(int(match[1]), match[2], *map(int, match.groups()[2:]))
