"""Deliver the small tensors of whole numbers that ranks give each other: counts, lengths, flags.

Programs decide by them, and in a fake world nothing arrives. But each rank knows what it gives, so
they are delivered once the runs as the other ranks have shown it: a rank that decides by them is
run again, as one that gathers objects is (``objects.py``). Values that were delivered are known if
each rank knows what it gave. Otherwise they still belong together: the ranks send as many tokens as
the others expect.

A collective is the same on all ranks if it has the same place among those of its group, as on a
real backend; a message, if it has the same place among all between its ranks and among those with
its tag. Tried on torch 2.13.0.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from commlens.check.origins import Origin, Origins, Ranks
from commlens.check.sequence import GuessKind
from commlens.check.small_tensors import TYPES, Given, result, unpack
from commlens.model.collective import FrameKind
from commlens.tap import tap
from commlens.tap.interned_args import noted_reduce_ops, reduce_op_name
from commlens.tap.running_frames import kind_of_file
from commlens.tracing.preview.objects import Key, Message

NUMBERS_MAX = 4096
"""Of one tensor: a larger one is data."""

TENSOR = "tensor"
"""The function in the keys of small tensors, before the name of their group."""

_BYTES_KEPT = 1_000_000  # of what one rank gives
_INPUTS = {  # the position of the tensor that a rank gives
    "allreduce_": 0,
    "broadcast_": 0,
    "send": 0,
    "recv_": 0,
    "allgather_": 1,
    "_allgather_base_": 1,
    "alltoall_base_": 1,
    "gather_": 1,
}
_SAME_FOR_ALL = ("allreduce_", "broadcast_", "allgather_", "_allgather_base_")
_PLUMBING = (  # through which every call goes
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/_ops.py",
    "/torch/overrides.py",
)


class _Call(NamedTuple):
    """A collective or message that gives this rank something."""

    name: str
    outputs: list[torch.Tensor]
    ranks: Ranks
    keys: list[Key]
    """Of what it takes, by rank."""
    how: tuple[Any, ...]


class Exchange:
    """A subscriber of the tap, which serves one run."""

    sees_fake_tensors = True  # to count all calls

    def __init__(
        self,
        rank: int,
        messages: Mapping[Key, Message | None],
        guess: Callable[[GuessKind], None],
    ) -> None:
        """Play a rank that knows what others gave in their runs. Call ``guess`` where values count
        as known from now on: it must turn out that the others give these.
        """
        self.gave: dict[Key, Message] = {}
        """What this rank gives."""
        self.is_wanted = False
        """Whether something that was not delivered decides, or goes into what this rank gives."""
        self._rank = rank
        self._messages = messages
        self._guess = guess
        self._took: dict[Key, Message | None] = {}
        self._numbers: Counter[tuple[Any, ...]] = Counter()
        self._receives_from_any = set[Ranks]()
        self._bytes = 0
        self._origins: Origins

    @property
    def took(self) -> dict[Key, Message | None]:
        """What other ranks gave this one; None for what they were not seen to give yet, if it is
        wanted.
        """
        return {
            key: message
            for key, message in self._took.items()
            if message is not None or self.is_wanted
        }

    def attach(self, origins: Origins) -> None:
        """Start. The tap calls ``origins`` first."""
        self._origins = origins
        tap.attach(self)

    def detach(self) -> None:
        """Stop."""
        tap.detach(self)

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> _Call | None:
        """Keep what this rank gives, and return what it takes, if anything."""
        group = tap.unbox_group(arguments[spec.process_group])
        ranks = tuple(dist.get_process_group_ranks(group))
        sources, receiver = self._ends(spec, arguments, ranks)
        line = (group.group_name, ranks, *(sources if receiver is not None else ()), receiver)
        number, how = self._place(line, spec, arguments)
        given = self._small_tensor(spec, arguments)
        if (
            given is None
            or len(ranks) == 1
            or (receiver is not None and ranks in self._receives_from_any)
        ):
            return None
        kind = f"{TENSOR} {group.group_name}"
        keys: list[Key] = [(kind, source, receiver, ranks, number) for source in sources]
        if self._rank in sources and self._bytes < _BYTES_KEPT:
            origin = self._origins.of(given)
            splits = tuple(arguments[spec.splits[0]]) if spec.splits[0] >= 0 else ()
            known = origin is None or origin.known
            self.is_wanted |= origin is not None and origin.undelivered
            with torch._C.DisableTorchFunction():
                message = Given(spec.name, how, known, splits, given).pack()
            self.gave[keys[sources.index(self._rank)]] = message
            self._bytes += len(message[1])
        outputs = _outputs(spec, arguments)
        return _Call(spec.name, outputs, ranks, keys, how) if outputs else None

    def returned(self, call: _Call | None, _: Any) -> None:
        """Write what the ranks give into the outputs of a call."""
        others = [] if call is None else [key for key in call.keys if key[1] != self._rank]
        if call is None or not others:
            return
        self._took.update((key, self._messages.get(key)) for key in others)
        given_to_us = (self.gave.get(key) or self._messages.get(key) for key in call.keys)
        messages = [message for message in given_to_us if message is not None]
        if len(messages) < len(call.keys):
            self._mark(call, Origin(undelivered=True))
            return
        given = [unpack(message) for message in messages]
        met = "send" if call.name == "recv_" else call.name
        if any((each.op, each.how) != (met, call.how) for each in given):
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            fits = result(given, call.ranks.index(self._rank), call.outputs)
        if fits and all(each.known for each in given):
            self._guess("exchange")
            same = call.name in _SAME_FOR_ALL
            self._mark(call, Origin(frozenset({call.ranks}), known=True) if same else None)

    def raised(self, call: _Call | None, error: BaseException) -> None:
        """Deliver nothing."""

    def _mark(self, call: _Call, origin: Origin | None) -> None:
        for output in call.outputs:
            before = self._origins.of(output)
            if origin is not None and origin.undelivered and before is not None:
                origin = before._replace(undelivered=True)
            self._origins.mark(output, origin)

    # --- one call

    def _ends(
        self, spec: tap.OpSpec, arguments: tuple[Any, ...], ranks: Ranks
    ) -> tuple[Ranks, int | None]:
        """Return the ranks that give something, and the only one that gets it, if it is a
        message.
        """
        if spec.name == "recv_any_source_":
            self._receives_from_any.add(ranks)
        if spec.name in ("send", "recv_"):
            other = _at(ranks, arguments[spec.peer])
            return ((self._rank,), other) if spec.name == "send" else ((other,), self._rank)
        if spec.name == "broadcast_":
            return (_at(ranks, arguments[spec.root]),), None
        return ranks, None

    def _place(
        self, line: tuple[Any, ...], spec: tap.OpSpec, arguments: tuple[Any, ...]
    ) -> tuple[int, tuple[Any, ...]]:
        """Return the number of a call on its line: those of a group, or between two ranks. And what
        the ranks must agree on.
        """
        self._numbers[line] += 1
        if spec.tag >= 0:
            tagged = *line, "tag", int(arguments[spec.tag])
            self._numbers[tagged] += 1
            return self._numbers[line], (tagged[-1], self._numbers[tagged])
        if spec.reduce_op < 0:
            return self._numbers[line], ()
        noted = noted_reduce_ops.get(threading.get_native_id())
        return self._numbers[line], (reduce_op_name(noted or arguments[spec.reduce_op]),)

    def _small_tensor(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the tensor that a rank gives, or into which it gets one, if that can be kept."""
        tensor = _only(arguments[_INPUTS[spec.name]]) if spec.name in _INPUTS else None
        if tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return None
        is_small = tensor.dtype in TYPES and tensor.numel() <= NUMBERS_MAX
        plain = tensor.layout is torch.strided
        return tensor if is_small and plain and not _called_by_torch() else None


def _at(ranks: Ranks, place: Any) -> int:
    """Return the rank at a place of a group; -1 if there is none."""
    return ranks[place] if 0 <= place < len(ranks) else -1


def _only(value: Any) -> torch.Tensor | None:
    """Return a tensor, or the only one of a list."""
    if isinstance(value, (list, tuple)):
        value = value[0] if len(value) == 1 else None
    return value if isinstance(value, torch.Tensor) else None


def _outputs(spec: tap.OpSpec, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that a call writes."""
    if spec.name == "send":
        return []
    written = arguments[spec.writes[0] if spec.writes else spec.tensors[0]]
    if spec.name in ("allgather_", "gather_"):
        return list(written[0]) if written else []
    return list(written) if isinstance(written, (list, tuple)) else [written]


def _called_by_torch() -> bool:
    """Check whether torch itself calls a collective, as those of objects do: what these give each
    other is delivered elsewhere.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        kind = kind_of_file(code.co_filename)
        if code.co_filename.endswith(_PLUMBING):
            if "object" in code.co_name:
                return True
        elif kind is not FrameKind.COMMLENS:
            return kind is FrameKind.TORCH
        frame = frame.f_back
    return False


def settled(gathered: Mapping[Key, Message | None]) -> set[GuessKind]:
    """Return what is no guess any more if ranks give what a rank took from them: None where a
    gather of objects took copies of the rank's own.
    """
    copied = any(
        message is None and not key[0].startswith(TENSOR) for key, message in gathered.items()
    )
    return {"exchange"} if copied else {"exchange", "object"}
