"""Look at this node's hardware while the ranks of a job are looked at."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.health.monitor import Monitor
from commlens.health.places import RankProcess
from commlens.model.health import NodeHealth
from commlens.model.ranklog import RankLog
from commlens.outside.find_ranks import FoundJob
from commlens.processes import process

_WAIT_S: Final = 10.0  # NCCL's RAS service may take so long


class HardwareLook:
    """Two looks at the hardware of this node, and one question to NCCL's RAS service.

    The first look and the question begin at once, in a thread.

    Args:
        job: the ranks on this node.
        root: the folder below which the node's files are.
        topology: the user's inventory of hosts.
    """

    def __init__(self, job: FoundJob, root: Path, topology: Path | None = None) -> None:
        self._job = job
        self._environments = {one.pid: process.environment(one.pid) for one in job.ranks}
        self._monitor = Monitor(root, past=True, topology=topology)
        environment = next(iter(self._environments.values()), {})
        self._monitor.learn_places(environment)
        self._monitor.look_now(environment)

    def finish(self, logs: Sequence[RankLog]) -> NodeHealth:
        """Look a second time, and return what was found since the job began.

        Args:
            logs: of the ranks on this node.
        """
        self._monitor.look_now()
        health = self._monitor.report(self._ranks(logs), wait_s=_WAIT_S)
        began_ns = min((_started_ns(one.start_ticks) for one in self._job.ranks), default=0)
        events = [event for event in health.events if event.at_ns >= began_ns]
        return msgspec.structs.replace(health, began_ns=began_ns, events=events)

    def _ranks(self, logs: Sequence[RankLog]) -> list[RankProcess]:
        """Return the ranks with their processes, and those that should be here and have none."""
        found = [
            RankProcess(
                log.rank,
                log.pid,
                log.local_rank,
                self._environments.get(log.pid, {}),
                process.swapped_bytes(log.pid),
            )
            for log in logs
        ]
        here = {log.rank for log in logs}
        return [*found, *_absent(self._job.expected, here)]

    def close(self) -> None:
        """End the thread."""
        self._monitor.close()


def _absent(expected: Sequence[int], here: Collection[int]) -> list[RankProcess]:
    return [
        RankProcess(rank, 0, local_rank, {})
        for local_rank, rank in enumerate(sorted(expected))
        if rank not in here
    ]


def _started_ns(start_ticks: int) -> int:
    """Return when a process started, Unix ns."""
    since_boot_ns = start_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns
    return time.time_ns() - age_ns
