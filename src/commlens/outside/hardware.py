"""Look at this node's hardware while the ranks of a job are looked at."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from commlens.health.monitor import Monitor
from commlens.health.places import RankOfNode
from commlens.model.health import NodeHealth
from commlens.model.ranklog import RankLog
from commlens.outside.find_ranks import FoundWorld
from commlens.processes import process

_WAIT_S: Final = 10.0  # NCCL's RAS service may take so long


@contextlib.contextmanager
def look_at_hardware(
    worlds: Sequence[FoundWorld], root: Path, topology: Path | None = None
) -> Iterator[Callable[[Sequence[RankLog]], NodeHealth]]:
    """Look at the hardware of this node, and ask NCCL's RAS service, in a thread. The function that
    this yields looks a second time, and returns what was found since the job began; it takes the
    logs of the ranks on this node.

    Args:
        worlds: the ranks on this node, of each world of the job.
        root: the folder below which the node's files are.
        topology: the user's inventory of hosts.
    """
    ranks = [one for world in worlds for one in world.ranks]
    environments = {one.pid: process.environment(one.pid) for one in ranks}
    monitor = Monitor(root, past=True, topology=topology)
    environment = next(iter(environments.values()), {})
    monitor.learn_places(environment)
    monitor.look_now(environment)

    def finish(logs: Sequence[RankLog]) -> NodeHealth:
        monitor.look_now()
        here = [
            RankOfNode(
                log.rank,
                log.pid,
                log.local_rank,
                environments.get(log.pid, {}),
                process.swapped_bytes(log.pid),
            )
            for log in logs
        ]
        known = {log.rank for log in logs}
        expected = sorted(worlds[0].expected) if len(worlds) == 1 else []
        absent = [
            RankOfNode(rank, 0, local_rank, {})
            for local_rank, rank in enumerate(expected)
            if rank not in known
        ]
        health = monitor.report([*here, *absent], wait_s=_WAIT_S)
        first_ticks = min((one.start_ticks for one in ranks), default=0)
        since_boot_ns = first_ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        began_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns
        events = [event for event in health.events if event.at_ns >= began_ns]
        return msgspec.structs.replace(health, began_ns=began_ns, events=events)

    try:
        yield finish
    finally:
        monitor.close()
