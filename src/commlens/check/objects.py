"""Exchange Python objects, and keys of the job's store, between the ranks of a fake world.

Each rank is run in a process of its own, in which no other rank exists. So what a rank sends is
kept, and given to the other ranks when they are run (``processes.py``). An example::

    dist.broadcast_object_list(config, src=0)    # rank 0 sends its list, as ``sent``
    store.set(f"port-{rank}", "29600")           # each rank writes a key, as ``keys``
    dist.all_gather_object(names, name)

If rank 1 is run first, it waits in the broadcast until rank 0 was run that far, and goes on with
its list. In the gather no rank waits: where an object is not known yet, the rank takes copies of
its own, as a guess, and ``gathered`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from commlens.check.branches import Answers
from commlens.check.recorder import EndOfRun, SequenceRecorder
from commlens.tracing.patches import Patches, called_by_torch
from commlens.tracing.preview.objects import Key, Message, Objects, pickled, ranks_of
from commlens.tracing.preview.store import FakeStore

Need = Key | str
"""An object of another rank, or a key of the store, for which a rank waits."""

_VALUES_KEPT = 4  # of one key of the store
_NEVER_SENT = [b"\0", b"\0"]
"""Stands for the message that no rank sends. No program sees it: the run ends before."""


@dataclass
class SharedValues:
    """The values that the ranks which were run so far have given to others."""

    messages: dict[Key, Message | None] = field(default_factory=dict)
    # of the store: by key, its different values
    keys: dict[str, list[bytes]] = field(default_factory=dict)
    answers: Answers = field(default_factory=dict)
    never: set[Need] = field(default_factory=set)  # objects and keys that no rank gives

    def of(self, rank: int) -> SharedValues:
        """Return the values that a rank may need: all but the messages in groups of others."""
        messages = {key: each for key, each in self.messages.items() if rank in key[3]}
        return replace(self, messages=messages)

    def add(self, messages: dict[Key, Message], keys: dict[str, list[bytes]]) -> None:
        """Add the objects and keys that a rank has sent."""
        self.messages.update(messages)
        for key, values in keys.items():
            known = self.keys.setdefault(key, [])
            known += [value for value in values if value not in known]
            del known[_VALUES_KEPT:]

    def differs(self, gathered: Mapping[Key, Message | None], ranks: Collection[int]) -> bool:
        """Check whether one of these ranks has sent another object than a gather took for it."""
        return any(
            self.messages.get(key) != message
            for key, message in gathered.items()
            if key[1] in ranks
        )

    def has(self, need: Need) -> bool:
        """Check whether a rank has sent this object or written this key."""
        return need in self.keys if isinstance(need, str) else need in self.messages

    def update(self, other: SharedValues) -> None:
        """Take over the values that ``other`` holds, in place."""
        self.messages.update(other.messages)
        self.keys.update(other.keys)
        self.answers.update(other.answers)
        self.never.update(other.never)


class SharedObjects(Objects):
    """Keeps every object that this rank sends and every key that it writes, and gives it those of
    the others. Where an object or a key is not known, the rank waits; if no rank ever gives it, the
    run ends in that call, as the real one would hang there.
    """

    def __init__(
        self,
        rank: int,
        shared: SharedValues,
        recorder: SequenceRecorder,
        wait_for: Callable[[Need], None],
    ) -> None:
        """Play a rank with the values that other ranks have shared. ``wait_for`` returns when
        ``shared`` has the needed value, or when it is certain that no rank ever sends it.
        """
        super().__init__(rank, shared.messages, None)
        self.sent: dict[Key, Message] = {}
        self.keys: dict[str, list[bytes]] = {}
        self.gathered: dict[Key, Message | None] = {}
        """The objects of all ranks in each gather; None: not known yet. A gather with such a None
        has delivered copies of this rank's own object for every rank.
        """
        self._own: dict[str, bytes] = {}  # by key of the store: the value that this rank wrote last
        self._shared = shared
        self._recorder = recorder
        self._wait_for = wait_for

    def install(self, patches: Patches) -> None:
        """Wrap torch's functions, and the methods of the fake world's stores."""
        super().install(patches)
        patches.wrap(FakeStore, "__init__", self._make_store)
        patches.wrap(FakeStore, "set", self._set)
        patches.wrap(FakeStore, "get", self._get)
        patches.wrap(FakeStore, "wait", self._wait)
        for name in ("check", "add", "compare_set", "num_keys", "delete_key"):
            patches.wrap(FakeStore, name, self._ask)

    # --- the store, where the program itself calls it: torch's own calls, as in
    # init_process_group, go to the FakeStore, which behaves as if all ranks made the same calls

    def _make_store(self, original: Any, store: FakeStore, *args: Any) -> None:
        original(store, *args)
        if store.port:
            self._recorder.setup_calls.note_store(store.host, store.port)

    def _set(self, original: Any, store: FakeStore, key: str, value: Any) -> None:
        original(store, key, value)
        if not called_by_torch():
            written = value.encode() if isinstance(value, str) else bytes(value)
            self._own[key] = written
            values = self.keys.setdefault(key, [])
            # a heartbeat writes another value in each step; SharedValues takes the first few only
            if written not in values[-_VALUES_KEPT:]:
                values.append(written)
            self._recorder.setup_calls.store_call("store.set", (key,))

    def _get(self, original: Any, store: FakeStore, key: str) -> bytes:
        if called_by_torch():
            return bytes(original(store, key))
        self._await("store.get", (key,))
        values = self._written(key)
        if len(values) > 1:  # which of them is there at this moment depends on the ranks' order
            self._recorder.notes.guess("store")
        return self._own.get(key) or values[0]

    def _wait(self, original: Any, store: FakeStore, keys: Sequence[str], *_: Any) -> None:
        if not called_by_torch():
            self._await("store.wait", tuple(keys))

    def _ask(self, original: Any, store: FakeStore, *args: Any) -> Any:
        if not called_by_torch():  # the answer depends on what the others have written so far
            self._recorder.notes.guess("store")
        return original(store, *args)

    def _await(self, op: str, keys: tuple[str, ...]) -> None:
        """Wait until some rank has written each key. Record the call, also if it never ends."""
        are_written = all(self._is_ever_written(key) for key in keys)
        self._recorder.setup_calls.store_call(op, keys)
        if not are_written:
            raise EndOfRun

    def _is_ever_written(self, key: str) -> bool:
        if not self._written(key) and key not in self._shared.never:
            self._wait_for(key)
        return bool(self._written(key))

    def _written(self, key: str) -> list[bytes]:
        """Return the different values of a key, of this rank's first."""
        return list(dict.fromkeys([*self.keys.get(key, ()), *self._shared.keys.get(key, ())]))

    # --- objects

    def _keep(self, key: Key, message: Message) -> None:
        self.sent[key] = message

    def _message(self, key: Key) -> Message:
        if not self._shared.has(key) and key not in self._shared.never:
            self._wait_for(key)
        if key in self._shared.never:
            # the next op is the one that would receive it: the run ends there, so that the record
            # has the op in which the rank hangs
            self._recorder.stop_at_next_op = True
            return _NEVER_SENT
        return super()._message(key)

    def _gather(self, original: Any, given: dict[str, Any]) -> Any:
        """Gather the objects that the other ranks sent in their runs. If one of them is not known
        yet, every rank is taken to have sent a copy of this rank's own.
        """
        ranks = ranks_of(given.get("group"))
        if self.rank not in ranks:
            return original(**given)
        self._recorder.notes.guess("object")
        kind, _, _, _, number = self._key(original.__name__, self.rank, None, ranks)
        keys: list[Key] = [(kind, rank, None, ranks, number) for rank in ranks]
        with unset_fake_temporarily():
            self.sent[keys[ranks.index(self.rank)]] = pickled([given["obj"]], given)
        messages = [self.sent.get(key) or self._shared.messages.get(key) for key in keys]
        self.gathered.update(zip(keys, messages, strict=True))
        if None in messages:
            return super()._gather(original, given)
        contents = [message[0] for message in messages if message is not None]
        with unset_fake_temporarily(), self.delivering_gathered(contents):
            return original(**given)
