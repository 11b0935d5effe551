"""Worlds of one rank that meet, in threads of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from commlens.model.collective import (
    SETUP,
    Channel,
    Collective,
    CollectiveArgs,
    HandMade,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import RankLog
from commlens.watch.meeting_worlds import MeetingWorlds
from commlens.watch.nodes.remote_evidence import _RankEvidence, pack_world
from commlens.watch.open_waits import OpenWait

STORE = "10.0.0.1:29600/weights"


def log_of(member: int, host: str, store: str = STORE, size: int = 2) -> RankLog:
    group = ProcessGroup("", (), hand_made=HandMade(member, size, store))
    args = CollectiveArgs("new_group", "new_group")
    made = Collective(0, Channel(group, SETUP), 1, args, State.COMPLETED, 1, 1)
    return RankLog(0, 1, f"job-{host}", host, 1000 + member, 0, setups=[made])


class World:
    """A world of one rank, which is a member of a group."""

    def __init__(self, member: int, where: str, folder: Path, host: str = "") -> None:
        self.host = host or f"host{member}"
        self.log = log_of(member, self.host)
        self.waiting: list[OpenWait] = []
        self.member: Any = SimpleNamespace(
            alive=True,
            status=SimpleNamespace(initialised=True),
            box=SimpleNamespace(log=lambda newest: self.log),
        )
        boxes = self.boxes = folder / f"boxes{member}" / "job"
        self.worlds = MeetingWorlds(self.host, lambda: None, where, [boxes], lambda n: self.look(n))
        self.asked = 0

    def tick(self) -> None:
        self.worlds.meet([self.member], self.waiting, self.worlds.groups([self.member]))
        self.worlds.answer(self.evidence)

    def hears(self) -> bool:
        return any(exchange.others for exchange in self.worlds._exchanges.values())

    def look(self, records: int) -> bytes:
        return self.evidence() if records > 1 else self.packed()

    def evidence(self) -> bytes:
        self.asked += 1
        return self.packed()

    def packed(self) -> bytes:
        ranks = msgspec.msgpack.encode([_RankEvidence(self.log, b"")])
        return pack_world([(self.host, ranks)])


def eventually(condition: Callable[[], Any], *ticking: World) -> Any:
    end = time.monotonic() + 30
    while True:
        for each in ticking:
            each.tick()
        if (found := condition()) or time.monotonic() > end:
            assert found
            return found
        time.sleep(0.02)


@contextlib.contextmanager
def ticking(world: World) -> Iterator[None]:
    """Lets the world's watcher go on in a thread."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.02):
            world.tick()

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
