"""The job's store in a run of one rank: keys that other ranks write are known from their runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlens.check.objects import SharedObjects
from commlens.check.recorder import EndOfRun, SequenceRecorder
from commlens.tracing.patches import Patches, called_by_torch
from commlens.tracing.preview.store import FakeStore


class SharedStore:
    """Notes what the program writes into a store and waits for. Calls of torch itself go on as in a
    preview.
    """

    def __init__(self, recorder: SequenceRecorder, objects: SharedObjects) -> None:
        self._recorder = recorder
        self._objects = objects
        self._own: dict[str, bytes] = {}

    def install(self, patches: Patches) -> None:
        """Wrap the methods of the fake world's stores."""
        patches.wrap(FakeStore, "set", self._set)
        patches.wrap(FakeStore, "get", self._get)
        patches.wrap(FakeStore, "wait", self._wait)
        for name in ("check", "add", "compare_set", "num_keys", "delete_key"):
            patches.wrap(FakeStore, name, self._ask)

    def _set(self, original: Any, store: FakeStore, key: str, value: Any) -> None:
        original(store, key, value)
        if not called_by_torch():
            self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._objects.wrote(key, self._own[key])
            self._recorder.store_call("store.set", (key,))

    def _get(self, original: Any, store: FakeStore, key: str) -> bytes:
        if called_by_torch():
            return bytes(original(store, key))
        self._await("store.get", (key,))
        values = self._objects.written(key)
        if len(values) > 1:
            self._recorder.guess("store")
        return self._own.get(key) or next(iter(values), b"")

    def _wait(self, original: Any, store: FakeStore, keys: Sequence[str], *_: Any) -> None:
        if not called_by_torch():
            self._await("store.wait", tuple(keys))

    def _ask(self, original: Any, store: FakeStore, *args: Any) -> Any:
        if not called_by_torch():
            self._recorder.guess("store")
        return original(store, *args)

    def _await(self, op: str, keys: tuple[str, ...]) -> None:
        written = all(self._objects.need_key(key) for key in keys)
        self._recorder.store_call(op, keys)
        if not written:
            raise EndOfRun
