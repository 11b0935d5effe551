"""Notes of processes that claim a rank of a job, as empty files beside the black boxes: they show a
rank that exists twice.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from commlens.blackbox import job_dirs

NAME: Final = re.compile(r"\.claim-(\d{1,9})-([0-9a-f]{8})-(\d{1,10})-(\d{1,20})-(\d{1,10})")


class Claim(NamedTuple):
    """A process that calls ``init_process_group`` with a rank, and was started by a rank of the
    launcher.
    """

    rank: int
    group: str  # of the place where the ranks meet, and their number
    pid: int
    start_ticks: int
    started_by: int  # pid of the rank that started it


def claim_rank(folder: Path, rank: int, meeting: str, world_size: int, started_by: int) -> Claim:
    """Note this process's claim in a job's folder."""
    group = hashlib.sha256(f"{meeting}|{world_size}".encode()).hexdigest()[:8]
    claim = Claim(rank, group, os.getpid(), job_dirs.start_ticks(os.getpid()), started_by)
    (folder / f".claim-{'-'.join(map(str, claim))}").touch(mode=0o600)
    return claim


def twins(folder: Path) -> dict[int, list[Claim]]:
    """Return the ranks that processes claim which different ranks of the launcher started, for one
    place to meet; the oldest first.

    Claims of the workers of an earlier run do not count: the boxes of those that started them are
    gone.
    """
    launched = {job_dirs.box_pid(box) for box in job_dirs.boxes(folder)}
    found: dict[tuple[int, str], dict[int, Claim]] = {}
    for claim in sorted(_claims(folder), key=lambda one: (one.start_ticks, one.pid)):
        if claim.started_by in launched:
            found.setdefault((claim.rank, claim.group), {}).setdefault(claim.started_by, claim)
    return {
        rank: list(by_starter.values())
        for (rank, _), by_starter in sorted(found.items())
        if len(by_starter) > 1
    }


def _claims(folder: Path) -> Iterable[Claim]:
    for name in os.listdir(folder):  # noqa: PTH208
        if match := NAME.fullmatch(name):
            yield Claim(int(match[1]), match[2], *map(int, match.groups()[2:]))
