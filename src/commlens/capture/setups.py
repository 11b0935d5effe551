"""Notes in the black box on what blocks a rank outside of collectives: the calls that make groups
and meshes, and waits in the store.

Each note is a blob. The word ``SETUP`` of the box holds the position of the newest one, and
``SETUP_SINCE`` when that call began, or that it has returned or raised. ``new_group([0, 1])`` that
hangs at train.py:9 is::

    {"k": "setup", "op": "new_group", "name": "3", "ranks": "0-1", "number": 3, "stack": ..., ...}

A wait in the store is noted once it lasts, by the watchdog thread. Its note is removed when the
wait ends, while the others stay.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from commlens.blackbox import layout as L
from commlens.capture.recorder import Recorder
from commlens.capture.thread_id import current
from commlens.model.ops import key_kind
from commlens.tap.hand_made import Membership
from commlens.text import format_ranks

_OURS = str(Path(__file__).parent)
_NOTE_WAIT_AFTER_NS = 500_000_000
_KEYS_MAX = 64  # kinds of keys that are noted
_KEY_LENGTH_MAX = 200


@dataclass
class _StoreWait:
    """A call that waits for keys in a store, or for a store."""

    call: dict[str, Any]  # for its note
    noted: bool = False


class Setups:
    """The calls of one process so far, as a chain of blobs.

    Inside a noted call, no other one is noted: ``new_group`` makes a gloo backend, which is hooked,
    too. But the groups that ``init_device_mesh`` makes are, since it blocks only in these.
    """

    def __init__(self, recorder: Recorder, world_size: int) -> None:
        self._recorder = recorder
        self._writer = recorder.writer
        self._newest = 0  # the position of the newest note
        self._is_noted = False  # the call under way is; it is not if its blob is too large
        self._depth = 0
        self._inits = self._meshes = self._splits = 0
        self._mesh: str | None = None  # while one is being made
        # the world size of the environment, until init_process_group is told one
        self._world_size = max(world_size, 0)
        # the thread that called init_process_group; before, the one that imported torch
        self._thread = current.id
        self._store_wait: _StoreWait | None = None  # the present one of that thread
        self._store_lock = threading.Lock()
        self._written: set[str] = set()  # the kinds of keys that are noted, with # for numbers

    def init_began(self, world_size: int, backend: str, label: str | None) -> None:
        """``init_process_group`` was called: all ranks meet there."""
        if not self._depth:
            self._world_size, self._thread = world_size, current.id
            self._inits += 1
            self._note(
                "init_process_group",
                "default_pg",
                range(world_size),
                number=self._inits,
                backend=backend,
                label=label,
            )
        self._depth += 1

    def group_began(
        self,
        name: str,
        description: str,
        ranks: Sequence[int],
        backend: str,
        by_hand: Membership | None,
        *,
        splits_world: bool = False,
    ) -> None:
        """``new_group`` makes a group, with or without this rank, or the program makes one by hand.
        Its members meet there. If it ``splits_world``, the communicator of the default group, all
        ranks of that one do, as with NCCL and a ``device_id``.
        """
        if not self._depth:
            more: dict[str, Any] = {}
            if by_hand is not None:
                more["hand"] = by_hand._asdict()
            if splits_world:
                more["of"] = format_ranks(ranks)  # the group's own ones
            self._note(
                "new_group",
                name,
                range(self._world_size) if splits_world else ranks,
                # torch names groups "1", "2", ...; a name of the program's own is no number
                number=max(int(name), 1) if name.isdecimal() else 1,
                backend=backend,
                desc="" if description == "undefined" else description,
                label=self._mesh,
                **more,
            )
        self._depth += 1

    def split_began(self, ranks: Sequence[int], split_ranks: Any) -> None:
        """The program called ``split_group``: the ranks of the parent group meet there."""
        if not self._depth:
            self._splits += 1
            self._note(
                "split_group",
                "split",
                ranks,
                number=self._splits,
                label=f"split_ranks={split_ranks}"[:200],
            )
        self._depth += 1

    def init_ended(self, raised: bool) -> None:
        """``init_process_group`` returned or raised."""
        self.ended(raised)
        self._inits -= raised and not self._depth

    def ended(self, raised: bool) -> None:
        """The call returned or raised."""
        self._depth = max(0, self._depth - 1)
        if not self._depth and self._is_noted:
            self._writer.word(L.SETUP_SINCE, L.SETUP_RAISED if raised else L.SETUP_RETURNED)

    def mesh_began(self, shape: Any, names: Any, world_size: int) -> None:
        """``init_device_mesh`` was called. It blocks only in the groups that it makes."""
        self._meshes += 1
        self._mesh = f"mesh {tuple(shape)}" + (
            f" named {', '.join(map(str, names))}" if names else ""
        )
        self._note(
            "init_device_mesh", "mesh", range(world_size), number=self._meshes, label=self._mesh
        )
        self._writer.word(L.SETUP_SINCE, L.SETUP_RETURNED)

    def mesh_ended(self) -> None:
        """``init_device_mesh`` returned or raised."""
        self._mesh = None

    # --- the store

    def store_wait_began(self, op: str, keys: Sequence[str], label: str | None = None) -> bool:
        """Note that a thread is about to wait for keys in the store, or at an address for a store
        to be made. Return whether to call :meth:`store_wait_ended` after it.

        Only one thread counts: the one that called ``init_process_group`` or, before that, imported
        torch. While another thread waits in the store, the training goes on.
        """
        if self._depth or self._thread != current.id or not keys:
            return False
        names, stack = [str(key)[:_KEY_LENGTH_MAX] for key in keys], self._stack(sys._getframe(1))
        label = f"and {len(names) - 1} more" if len(names) > 1 else label
        call = {"op": op, "name": names[0], "label": label, "thread": current.id, "stack": stack}
        self._store_wait = _StoreWait({**call, "number": 1, "began": time.monotonic_ns()})
        return True

    def store_wait_ended(self) -> None:
        """The keys are there, or the store's timeout is over."""
        with self._store_lock:
            wait, self._store_wait = self._store_wait, None
            if wait is not None and wait.noted:
                self._writer.word(L.SETUP_SINCE, L.SETUP_RETURNED)
                self._writer.word(L.SETUP, self._newest)

    def note_store_wait(self, now: int) -> None:
        """Note the present wait if it has lasted for long; called by the watchdog thread."""
        wait = self._store_wait
        if wait is None or wait.noted or now - wait.call["began"] < _NOTE_WAIT_AFTER_NS:
            return
        with self._store_lock:
            if self._store_wait is wait:
                wait.noted = True
                position = self._add(ranks=range(self._world_size), **wait.call)
                self._writer.word(L.SETUP, position)
                self._writer.word(L.SETUP_SINCE, wait.call["began"])

    def keys_written(self, keys: Sequence[str]) -> None:
        """The process writes keys into the store. The first key of each kind is noted: those of a
        kind are the same but for numbers.
        """
        if self._depth or not self._inits or self._store_wait is not None:
            return  # the note would hide that of the call or the wait under way
        for key in keys:
            kind = key_kind(str(key)[:_KEY_LENGTH_MAX])
            if kind not in self._written and len(self._written) < _KEYS_MAX:
                self._written.add(kind)
                self._note("store.set", str(key)[:_KEY_LENGTH_MAX], (), number=1)
                self._writer.word(L.SETUP_SINCE, L.SETUP_RETURNED)

    def _note(self, op: str, name: str, ranks: Sequence[int], *, number: int, **about: Any) -> None:
        now = time.monotonic_ns()
        stack = self._stack(sys._getframe(2))
        position = self._add(
            op, name, ranks, number=number, stack=stack, thread=current.id, began=now, **about
        )
        self._is_noted = position > 0
        if not self._is_noted:
            return  # else the call before would seem to be under way
        self._newest = position
        writer = self._writer
        # in this order, a reader never sees the call before, which has ended, as under way
        writer.word(L.SETUP_SINCE, L.SETUP_RETURNED)
        writer.word(L.SETUP, self._newest)
        writer.word(L.SETUP_SINCE, now)

    def _stack(self, frame: FrameType | None) -> int:
        """Return the position of a stack, without the frames of commlens.capture at its end."""
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        return self._recorder.stacks.position(frame)

    def _add(self, op: str, name: str, ranks: Sequence[int], **about: Any) -> int:
        """Write a call's blob and return its position; 0 if it is too large."""
        blob = {"k": "setup", "op": op, "name": name, "ranks": format_ranks(ranks), **about}
        # as groups count them: how many default groups there were before the present one
        blob |= {"inc": max(self._inits - 1, 0), "prev": self._newest}
        return int(self._writer.add_blob(blob))
