"""Notes in the black box on the calls that make process groups and meshes, which may block before the first collective."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from commlens.blackbox import layout as L
from commlens.capture.recorder import Recorder
from commlens.capture.thread_id import current
from commlens.text import format_ranks

_OURS = str(Path(__file__).parent)


class Setups:
    """The calls of one process so far, as a chain of blobs. A call inside another one is not noted."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._writer = recorder.writer
        self._newest = 0
        self._depth = 0
        self._inits = self._meshes = self._splits = 0
        self._mesh: str | None = None  # while one is being made

    def init_began(self, world_size: int, backend: str, label: str | None) -> None:
        """``init_process_group`` was called: all ranks meet there."""
        if not self._depth:
            self._inits += 1
            self._note("init_process_group", "default_pg", range(world_size), number=self._inits, backend=backend, label=label)
        self._depth += 1

    def group_began(self, name: str, ranks: Sequence[int], backend: str, description: str) -> None:
        """``new_group`` makes a group, with or without this rank. Its members meet there."""
        if not self._depth:
            number = int(name) if name.isdecimal() else 1
            desc = "" if description == "undefined" else description
            self._note("new_group", name, ranks, number=max(number, 1), backend=backend, desc=desc, label=self._mesh)
        self._depth += 1

    def split_began(self, ranks: Sequence[int], split_ranks: Any) -> None:
        """``split_group`` was called: the ranks of the parent group meet there."""
        if not self._depth:
            self._splits += 1
            self._note("split_group", "split", ranks, number=self._splits, label=f"split_ranks={split_ranks}"[:200])
        self._depth += 1

    def init_ended(self, raised: bool) -> None:
        """``init_process_group`` returned or raised."""
        self.ended(raised)
        self._inits -= raised and not self._depth

    def ended(self, raised: bool) -> None:
        """The call returned or raised."""
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._writer.word(L.SETUP_SINCE, L.SETUP_RAISED if raised else L.SETUP_RETURNED)

    def mesh_began(self, shape: Any, names: Any, world_size: int) -> None:
        """``init_device_mesh`` was called. It blocks only in the groups that it makes."""
        self._meshes += 1
        self._mesh = f"mesh {tuple(shape)}" + (f" named {', '.join(map(str, names))}" if names else "")
        self._note("init_device_mesh", "mesh", range(world_size), number=self._meshes, label=self._mesh)
        self._writer.word(L.SETUP_SINCE, L.SETUP_RETURNED)

    def mesh_ended(self) -> None:
        """``init_device_mesh`` returned or raised."""
        self._mesh = None

    def _note(self, op: str, name: str, ranks: Sequence[int], *, number: int, **about: Any) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        now, writer = time.monotonic_ns(), self._writer
        blob = {
            "k": "setup",
            "op": op,
            "name": name,
            "ranks": format_ranks(ranks),
            "number": number,
            **about,
            "inc": max(self._inits - 1, 0),
            "stack": self._recorder.stacks.position(frame),
            "thread": current.id,
            "began": now,
            "prev": self._newest,
        }
        position = writer.add_blob(blob)
        self._newest = position or self._newest
        writer.word(L.SETUP_SINCE, L.SETUP_RETURNED)  # a reader never meets the new call with the old one's state
        writer.word(L.SETUP, self._newest)
        writer.word(L.SETUP_SINCE, now)
