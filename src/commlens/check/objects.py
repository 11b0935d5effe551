"""Objects and keys that ranks of a fake world give each other, known from the runs as these
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from commlens.check.branches import Answers
from commlens.check.recorder import SequenceRecorder
from commlens.tracing.preview.objects import (
    Key,
    Message,
    Objects,
    arguments_of,
    pickled,
    ranks_of,
)

Need = Key | str
"""What a rank needs from another one: an object, or a key of the store."""

KEYS_KEPT = 4  # different values of one key of the store


class Shared:
    """What the ranks that were run so far have given to others."""

    def __init__(self) -> None:
        self.messages: dict[Key, Message | None] = {}
        self.keys: dict[str, list[bytes]] = {}
        self.answers: Answers = {}
        self.never: set[Need] = set()
        """What no rank gives."""

    def copy(self) -> Shared:
        """Return a copy, to which others may be added."""
        other = Shared()
        other.messages = dict(self.messages)
        other.keys = {key: list(values) for key, values in self.keys.items()}
        other.answers = dict(self.answers)
        other.never = set(self.never)
        return other

    def of(self, rank: int) -> Shared:
        """Return what a rank may need: the messages in its groups, and the rest."""
        other = self.copy()
        other.messages = {key: each for key, each in self.messages.items() if rank in key[3]}
        return other

    def add(self, messages: dict[Key, Message], keys: dict[str, list[bytes]]) -> None:
        """Add what a rank has given."""
        self.messages.update(messages)
        for key, values in keys.items():
            known = self.keys.setdefault(key, [])
            known += [value for value in values if value not in known]
            del known[KEYS_KEPT:]

    def differs(self, gathered: Mapping[Key, Message | None], ranks: Collection[int]) -> bool:
        """Check whether any of these ranks gives another object than a gather took from it."""
        return any(
            self.messages.get(key) != message
            for key, message in gathered.items()
            if key[1] in ranks
        )

    def has(self, need: Need) -> bool:
        """Check whether a rank has given it."""
        return need in self.keys if isinstance(need, str) else need in self.messages

    def is_decided(self, need: Need) -> bool:
        """Check whether a rank has given it, or none ever does."""
        return self.has(need) or need in self.never

    def update(self, other: Shared) -> None:
        """Take over what another one knows, in place."""
        self.messages.update(other.messages)
        self.keys.update(other.keys)
        self.answers.update(other.answers)
        self.never.update(other.never)


class SharedObjects(Objects):
    """Keeps every object that this rank sends. Where it needs one that is not known, it waits, and
    goes on to the next call if nobody sends it.
    """

    def __init__(
        self,
        rank: int,
        shared: Shared,
        recorder: SequenceRecorder,
        wait_for: Callable[[Need], None],
    ) -> None:
        """Play a rank that knows what others have given. ``wait_for`` returns when it is decided
        whether one of them gives what this rank needs.
        """
        super().__init__(rank, shared.messages, None)
        self.sent: dict[Key, Message] = {}
        self.keys: dict[str, list[bytes]] = {}
        self.gathered: dict[Key, Message | None] = {}
        """The objects that gathers took from other ranks; None where its own stood for them."""
        self._shared = shared
        self._recorder = recorder
        self._wait_for = wait_for

    # --- the store

    def wrote(self, key: str, value: bytes) -> None:
        """Note that this rank wrote a key."""
        values = self.keys.setdefault(key, [])
        if value not in values[-KEYS_KEPT:]:
            values.append(value)

    def written(self, key: str) -> list[bytes]:
        """Return the different values of a key."""
        return list(dict.fromkeys([*self.keys.get(key, ()), *self._shared.keys.get(key, ())]))

    def need_key(self, key: str) -> bool:
        """Return whether a key that this rank waits for is ever written."""
        if not self.written(key) and key not in self._shared.never:
            self._wait_for(key)
        return bool(self.written(key))

    # --- objects

    def _keep(self, key: Key, message: Message) -> None:
        self.sent[key] = message

    def _message(self, key: Key) -> Message:
        if not self._shared.is_decided(key):
            self._wait_for(key)
        if key in self._shared.never:
            self._recorder.stop_at_next_op = True
            return [b"\0", b"\0"]
        return super()._message(key)

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather the objects that the other ranks were seen to give. As long as some are not known,
        the rank goes on with copies of its own.
        """
        given = arguments_of(original, args, kwargs)
        ranks = ranks_of(given.get("group"))
        if self.rank not in ranks:
            return original(*args, **kwargs)
        self._recorder.guess("object")
        kind, _, _, _, number = self._key(original.__name__, self.rank, None, ranks)
        keys: list[Key] = [(kind, rank, None, ranks, number) for rank in ranks]
        with unset_fake_temporarily():
            self.sent[keys[ranks.index(self.rank)]] = pickled([given["obj"]], given)
        messages = [self.sent.get(key) or self._shared.messages.get(key) for key in keys]
        self.gathered.update(zip(keys, messages, strict=True))
        if None in messages:
            return super()._gather(original, *args, **kwargs)
        contents = [message[0] for message in messages if message is not None]
        with unset_fake_temporarily(), self.delivering_gathered(contents):
            return original(*args, **kwargs)
