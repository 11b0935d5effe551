"""Joins the monitor of this node's hardware with the ranks' processes, for the watcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from commlens.config import Settings
from commlens.health.monitor import Monitor
from commlens.health.places import ADAPTER_CHOICES, VISIBLE_DEVICES, RankOfNode
from commlens.health.ras import RAS_ADDRESS
from commlens.health.sources import ROOT
from commlens.health.topology import TOPOLOGY_VARIABLES
from commlens.model.health import NodeHealth, Values
from commlens.processes import process
from commlens.watch.roster import Member

_VARIABLES_KEPT = frozenset(
    {RAS_ADDRESS, *VISIBLE_DEVICES, *TOPOLOGY_VARIABLES, *chain(*ADAPTER_CHOICES.values())}
)


class HealthOfNode:
    """Watches the hardware of this node, unless the settings say otherwise.

    Args:
        settings: ``health`` and ``topology``.
    """

    def __init__(self, settings: Settings) -> None:
        self._monitor: Monitor | None = None
        # by pid; that of a rank that had ended before is empty
        self._environments: dict[int, Mapping[str, str]] = {}
        if settings.health != "off":
            self._monitor = Monitor(root_of(settings), topology=topology_of(settings))

    def add(self, members: Iterable[Member]) -> None:
        """Keep the environments of new ranks: that of an ended rank cannot be read."""
        knew_none = not any(self._environments.values())
        for member in members:
            if member.here and self._monitor is not None:
                whole = process.environment(member.pid)
                self._environments[member.pid] = {
                    name: value for name, value in whole.items() if name in _VARIABLES_KEPT
                }
        if knew_none and self._monitor is not None and (environment := self._an_environment()):
            self._monitor.learn_places(environment)

    def _an_environment(self) -> Mapping[str, str]:
        return next(filter(None, self._environments.values()), {})

    def look_now(self, *, ask_ras: bool = False) -> None:
        """Ask for a look at all sources, because something may be wrong.

        Args:
            ask_ras: also ask NCCL's RAS service, which collects its answer from all ranks.
        """
        if self._monitor is not None:
            self._monitor.look_now(self._an_environment() if ask_ras else None)

    def report(self, members: Sequence[Member]) -> NodeHealth | None:
        """Return the state of the hardware, from a fresh look if one is ready in time; None if
        nothing is watched.
        """
        if self._monitor is None:
            return None
        ranks = [
            RankOfNode(
                member.rank,
                member.pid,
                member.local_rank,
                self._environments.get(member.pid, {}),
                process.swapped_bytes(member.pid) if member.alive else 0.0,
            )
            for member in members
            if member.here
        ]
        return self._monitor.report(ranks)

    @property
    def faults(self) -> Mapping[str, int]:
        """How many changes of each fault were seen so far."""
        return self._monitor.faults if self._monitor is not None else {}

    @property
    def values(self) -> Mapping[str, Values]:
        """The values of the last look, by source."""
        return self._monitor.values if self._monitor is not None else {}

    def close(self) -> None:
        """Stop watching."""
        if self._monitor is not None:
            self._monitor.close()


def root_of(settings: Settings) -> Path:
    """Return the folder below which the node's files are."""
    return ROOT if settings.health in ("on", "off") else Path(settings.health)


def topology_of(settings: Settings) -> Path | None:
    """Return the user's inventory of hosts."""
    return Path(settings.topology) if settings.topology is not None else None
