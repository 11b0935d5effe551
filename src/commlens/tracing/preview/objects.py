"""Object collectives of a fake world, where no other rank exists to send an object.

Objects that this rank sends are handled by torch. An object from another rank is learned by running the program as that rank up to the
send (see ``preview.py``). The tensors that carry it are filled at the tap, so torch's own functions run unchanged. Gathered objects are
assumed to equal this rank's own. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily

from commlens.tap import tap
from commlens.tracing.patches import Patches

Key = tuple[str, int, int | None, tuple[int, ...], int]
"""Identifies a message: function, global source rank, destination rank if any, the group's ranks, and the number of the call, from 1."""

Message = list[bytes]
"""Pickled objects."""


class Unknown(BaseException):
    """This rank needs an object from another rank. ``except Exception`` does not catch it."""

    def __init__(self, key: Key) -> None:
        super().__init__(f"rank {key[1]} sends an object")
        self.key = key


class Learned(BaseException):
    """The run has reached the send given as ``until``."""


class Objects:
    """The object collectives of one run."""

    sees_fake_tensors = False

    def __init__(self, rank: int, known: dict[Key, Message | None], until: Key | None) -> None:
        """Play a rank that knows some of the messages from others.

        Args:
            rank: the rank that this process plays.
            known: messages from other ranks, learned in earlier runs; None for those that could not be learned.
            until: raise ``Learned`` when this message is sent, and keep it in ``known``.
        """
        self.rank = rank
        self.known = known
        self.until = until
        self.unknown: list[str] = []
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._deliveries = _Deliveries()

    def install(self, patches: Patches) -> None:
        """Wrap torch's functions."""
        for name in ("all_gather_object", "gather_object"):
            patches.wrap(c10d, name, self._wrap_gather)
        patches.wrap(c10d, "broadcast_object_list", self._broadcast)
        patches.wrap(c10d, "scatter_object_list", self._scatter)
        patches.wrap(c10d, "send_object_list", self._send)
        patches.wrap(c10d, "recv_object_list", self._receive)
        tap.attach(self)

    def remove(self) -> None:
        """Detach from the tap."""
        tap.detach(self)

    def delivering(self, *contents: torch.Tensor | bytes) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the next receiving collectives receive these contents."""
        tensors = [torch.frombuffer(bytearray(each), dtype=torch.uint8) if isinstance(each, bytes) else each for each in contents]
        return self._deliveries.delivering([*tensors])

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Any:
        """Return a function that fills the op's tensors, if it delivers anything."""
        deliveries = self._deliveries
        if deliveries.gathers and spec.name == "gather_":
            return lambda: _loop_back(arguments)
        if deliveries.pending and spec.name in ("broadcast_", "scatter_", "recv_", "recv_any_source_"):
            content = deliveries.pending.pop(0)
            return None if content is None else lambda: _fill(arguments[0], content)
        return None

    def returned(self, token: Any, result: Any) -> None:
        """Fill the tensors."""
        if token is not None:
            token()

    def raised(self, token: Any, error: BaseException) -> None:
        """Deliver nothing."""

    # --- the wrappers

    def _wrap_gather(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily(), self._deliveries.delivering([], gathers=True):
                return original(*args, **kwargs)

        return wrapper

    def _broadcast(self, original: Any) -> Any:
        @functools.wraps(original)
        def broadcast_object_list(
            object_list: list[Any],
            src: int | None = None,
            group: Any = None,
            device: Any = None,
            group_src: int | None = None,
            **kwargs: Any,
        ) -> Any:
            given = {"group": group, "device": device, **_given(src=src, group_src=group_src), **kwargs}
            ranks, source = _ranks(group), _global(group, src, group_src)
            if self.rank not in ranks:
                return original(object_list, **given)
            key = self._key("broadcast", source, None, ranks)
            with unset_fake_temporarily():
                if source == self.rank:
                    self._keep(key, _pickled(object_list, kwargs))
                    return original(object_list, **given)
                with self._delivering_objects(key, object_list, kwargs):
                    return original(object_list, **given)

        return broadcast_object_list

    def _scatter(self, original: Any) -> Any:
        @functools.wraps(original)
        def scatter_object_list(
            scatter_object_output_list: list[Any],
            scatter_object_input_list: list[Any] | None = None,
            src: int | None = None,
            group: Any = None,
            group_src: int | None = None,
            **kwargs: Any,
        ) -> Any:
            given = {"group": group, **_given(src=src, group_src=group_src), **kwargs}
            ranks, source = _ranks(group), _global(group, src, group_src)
            if self.rank not in ranks:
                return original(scatter_object_output_list, scatter_object_input_list, **given)
            with unset_fake_temporarily():
                if source == self.rank and scatter_object_input_list and len(scatter_object_input_list) == len(ranks):
                    messages = _pickled(scatter_object_input_list, kwargs)
                    largest = len(max(messages, key=len))
                    for rank, message in zip(ranks, messages, strict=True):
                        self._keep(self._key("scatter", source, rank, ranks), [message, b"\0" * largest])
                    mine = messages[ranks.index(self.rank)]
                else:
                    known = self._message(self._key("scatter", source, self.rank, ranks))
                    mine = known[0] if known else _pickled([None], kwargs)[0]
                    largest = len(known[1]) if known else len(mine)
                with self.delivering(_as_tensor(largest), mine.ljust(largest, b"\0"), _as_tensor(len(mine))):
                    return original(scatter_object_output_list, scatter_object_input_list, **given)

        return scatter_object_list

    def _send(self, original: Any) -> Any:
        @functools.wraps(original)
        def send_object_list(
            object_list: list[Any],
            dst: int | None = None,
            group: Any = None,
            device: Any = None,
            group_dst: int | None = None,
            **kwargs: Any,
        ) -> Any:
            with unset_fake_temporarily():
                ranks = _ranks(group)
                if self.rank in ranks:
                    key = self._key("send", self.rank, _global(group, dst, group_dst), ranks)
                    self._keep(key, _pickled(object_list, kwargs))
                return original(object_list, group=group, device=device, **_given(dst=dst, group_dst=group_dst), **kwargs)

        return send_object_list

    def _receive(self, original: Any) -> Any:
        @functools.wraps(original)
        def recv_object_list(
            object_list: list[Any],
            src: int | None = None,
            group: Any = None,
            device: Any = None,
            group_src: int | None = None,
            **kwargs: Any,
        ) -> Any:
            given = {"group": group, "device": device, **_given(src=src, group_src=group_src), **kwargs}
            ranks = _ranks(group)
            if self.rank not in ranks:
                return original(object_list, **given)
            with unset_fake_temporarily():
                # A receive from any rank is assumed to be from the previous rank.
                source = ranks[ranks.index(self.rank) - 1] if src is None and group_src is None else _global(group, src, group_src)
                with self._delivering_objects(self._key("send", source, self.rank, ranks), object_list, kwargs):
                    return original(object_list, **given)

        return recv_object_list

    def _delivering_objects(self, key: Key, object_list: list[Any], kwargs: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        message = self._message(key)
        if message is None or len(message) != len(object_list):
            message = _pickled(object_list, kwargs)
        return self.delivering(_sizes(message), b"".join(message))

    # --- messages

    def _key(self, kind: str, source: int, destination: int | None, ranks: tuple[int, ...]) -> Key:
        call = (kind, source, destination, ranks)
        self._counts[call] += 1
        return (*call, self._counts[call])

    def _keep(self, key: Key, message: Message) -> None:
        if key == self.until:
            self.known[key] = message
            raise Learned

    def _message(self, key: Key) -> Message | None:
        if key not in self.known:
            raise Unknown(key)
        message = self.known[key]
        if message is None:
            sent = {"broadcast": "broadcast", "scatter": "scattered", "send": "sent"}[key[0]]
            self.unknown.append(f"The object that rank {key[1]} {sent} is unknown; this rank's own object was used instead.")
        return message


class _Deliveries(threading.local):
    """The contents for the tensors of this thread's current object collective, in order; None leaves a tensor alone."""

    def __init__(self) -> None:
        self.pending: list[torch.Tensor | None] = []
        self.gathers = False

    @contextlib.contextmanager
    def delivering(self, contents: list[torch.Tensor | None], *, gathers: bool = False) -> Iterator[None]:
        self.pending, self.gathers = contents, gathers
        try:
            yield
        finally:
            self.pending, self.gathers = [], False


def _given(**ranks: int | None) -> dict[str, int]:
    return {name: rank for name, rank in ranks.items() if rank is not None}  # torch 2.5 has no group_src


def _ranks(group: Any) -> tuple[int, ...]:
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return ()
    return tuple(c10d.get_process_group_ranks(group if group is not None else c10d._get_default_group()))


def _global(group: Any, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        ranks = _ranks(group)
        return ranks[group_rank] if 0 <= group_rank < len(ranks) else group_rank
    return rank if rank is not None else 0


def _pickled(objects: list[Any], kwargs: dict[str, Any]) -> Message:
    options = {"weights_only": kwargs["weights_only"]} if kwargs.get("weights_only") else {}
    group = c10d._get_default_group()
    return [c10d._object_to_tensor(each, torch.device("cpu"), group, **options)[0].numpy().tobytes() for each in objects]


def _sizes(message: Message) -> torch.Tensor:
    return torch.tensor([len(each) for each in message], dtype=torch.long)


def _as_tensor(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.long)


def _fill(target: Any, content: torch.Tensor) -> None:
    tensor = target[0] if isinstance(target, (list, tuple)) else target
    flat = tensor.view(-1)
    amount = min(flat.numel(), content.numel())
    flat[:amount].copy_(content[:amount])


def _loop_back(arguments: tuple[Any, ...]) -> None:
    outputs, inputs = arguments[0], arguments[1]
    for output in outputs[0] if outputs else []:
        output.copy_(inputs[0])
