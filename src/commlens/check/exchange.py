"""Deliver the small tensors of whole numbers that ranks send each other: counts, lengths, flags.

A program takes branches by such numbers, and in a fake world none arrives. But each rank knows the
tensors that it sends. So a rank that takes a branch by a number of other ranks is run again once
those have run, and then receives their tensors, as it receives objects (``objects.py``). The
numbers count as known if each sender knew its own. If not, they are still consistent: the ranks
send as many tokens as the others expect.

An example is ``all_to_all_single(received, counts)`` on ranks 0 and 1. In their first runs, both
send ``counts`` (``CheckExchange.gave``), and ``received`` is marked as undelivered. If a rank then
takes a branch by ``received``, its tensors are wanted: in its second run it gets them.

Calls of different ranks belong to one collective if they have the same number among the calls of
their group, as on a real backend. A send and a receive belong together if they have the same number
among the messages between their ranks, and among those with their tag. Tried on torch 2.13.0.
"""

from __future__ import annotations

import pickle
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from commlens.check.origins import Origins, Ranks, ValueOrigin
from commlens.check.sequence import GuessKind
from commlens.model.collective import FrameKind
from commlens.tap import tap
from commlens.tap.interned_args import reduce_op_name
from commlens.tap.running_frames import kind_of_file
from commlens.tap.torch_patches import noted_reduce_ops
from commlens.tracing.preview.objects import Key, Message

TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
"""The dtypes of the tensors that are delivered. Floats are not: their sum depends on the order in
which a backend adds them.
"""

NUMBERS_MAX = 4096
"""The largest tensor that is delivered, in elements; a larger one is data."""

TENSOR = "tensor"
"""The function in the keys of small tensors, before the name of their group."""

_BYTES_KEPT = 1_000_000  # of the tensors that one rank sends
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
    """A collective or message whose result this rank receives."""

    name: str
    outputs: list[torch.Tensor]
    ranks: Ranks
    keys: list[Key]
    """The keys of the tensors that make up the result, one for each rank that sends."""
    agreed: tuple[Any, ...]
    """The arguments that must be equal on its ranks: the reduce op, the tag."""


class CheckExchange(tap.Subscriber):
    """A subscriber of the tap that delivers the small tensors of one run."""

    sees_fake_tensors = True  # to count all calls

    def __init__(
        self,
        rank: int,
        messages: Mapping[Key, Message | None],
        guess: Callable[[GuessKind], None],
    ) -> None:
        """Play a rank, with the tensors that other ranks sent in their runs.

        Args:
            rank: the rank.
            messages: the tensors of the other ranks; None: a tensor is not known yet.
            guess: called when delivered values count as known from here on. They are a guess until
                the other ranks have run again and have sent the same.
        """
        self.gave: dict[Key, Message] = {}
        """The tensors that this rank sends."""
        self.is_wanted = False
        """Whether an undelivered value decides a branch, or goes into a tensor that this rank
        sends.
        """
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
        """The tensors of other ranks that this rank received. A tensor that is not known yet is
        None, and is listed only if it is wanted.
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
        """Keep the tensor that this rank sends, and return the call if this rank receives a
        result.
        """
        group = self._origins.groups.find(tap.unbox_group(arguments[spec.process_group]))
        ranks = tuple(group.ranks)
        if spec.name == "recv_any_source_":
            self._receives_from_any.add(ranks)
        sources, receiver = self._sources_and_receiver(spec, arguments, ranks)
        counter = (group.name, ranks, *(sources if receiver is not None else ()), receiver)
        number, agreed = self._count_call(counter, spec, arguments)
        given = self._small_tensor(spec, arguments)
        # which message a receive takes is not certain where others take one from any rank
        is_uncertain = receiver is not None and ranks in self._receives_from_any
        if given is None or len(ranks) == 1 or is_uncertain:
            return None
        kind = f"{TENSOR} {group.name}"
        keys: list[Key] = [(kind, source, receiver, ranks, number) for source in sources]
        if self._rank in sources and self._bytes < _BYTES_KEPT:
            origin = self._origins.of(given)
            splits = tuple(arguments[spec.splits[0]]) if spec.splits[0] >= 0 else ()
            known = origin is None or origin.known
            self.is_wanted |= origin is not None and origin.undelivered
            with torch._C.DisableTorchFunction():
                message = Given(spec.name, agreed, known, splits, given).pack()
            self.gave[keys[sources.index(self._rank)]] = message
            self._bytes += len(message[1])
        outputs = _outputs(spec, arguments)
        return _Call(spec.name, outputs, ranks, keys, agreed) if outputs else None

    def returned(self, call: _Call | None, _: Any) -> None:
        """Write the result into the outputs of a call, if the tensors of all its ranks are
        known.
        """
        if call is None or all(key[1] == self._rank for key in call.keys):
            return
        given = self._given_to(call)
        op = "send" if call.name == "recv_" else call.name
        if given is None or any((each.op, each.agreed) != (op, call.agreed) for each in given):
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            fits = result(given, call.ranks.index(self._rank), call.outputs)
        if fits and all(each.known for each in given):
            self._guess("exchange")
            same = call.name in _SAME_FOR_ALL
            self._mark(call, ValueOrigin(frozenset({call.ranks}), known=True) if same else None)

    def _given_to(self, call: _Call) -> list[Given] | None:
        """Return the tensors that the ranks send in a call; None if one of them is not known
        yet.
        """
        others = {key: self._messages.get(key) for key in call.keys if key[1] != self._rank}
        self._took.update(others)
        messages = [self.gave.get(key) or others.get(key) for key in call.keys]
        if None in messages:
            self._mark(call, ValueOrigin(undelivered=True))
            return None
        return [unpack(message) for message in messages if message is not None]

    def _mark(self, call: _Call, origin: ValueOrigin | None) -> None:
        for output in call.outputs:
            before = self._origins.of(output)
            if origin is not None and origin.undelivered and before is not None:
                origin = before._replace(undelivered=True)
            self._origins.mark(output, origin)

    # --- one call

    def _sources_and_receiver(
        self, spec: tap.OpSpec, arguments: tuple[Any, ...], ranks: Ranks
    ) -> tuple[Ranks, int | None]:
        """Return the ranks that send, and the rank that receives; None if all ranks of the group
        receive.
        """
        if spec.name in ("send", "recv_"):
            other = _rank_at(ranks, arguments[spec.peer])
            return ((self._rank,), other) if spec.name == "send" else ((other,), self._rank)
        if spec.name == "broadcast_":
            return (_rank_at(ranks, arguments[spec.root]),), None
        return ranks, None

    def _count_call(
        self, counter: tuple[Any, ...], spec: tap.OpSpec, arguments: tuple[Any, ...]
    ) -> tuple[int, tuple[Any, ...]]:
        """Count a call among the calls of its group, or among the messages between its two ranks.
        Return its number, and the arguments that must be equal on its ranks.
        """
        self._numbers[counter] += 1
        number = self._numbers[counter]
        if spec.tag >= 0:
            tag = int(arguments[spec.tag])
            tagged = (*counter, "tag", tag)
            self._numbers[tagged] += 1
            return number, (tag, self._numbers[tagged])
        if spec.reduce_op < 0:
            return number, ()
        noted = noted_reduce_ops.get(threading.get_native_id())
        return number, (reduce_op_name(noted or arguments[spec.reduce_op]),)

    def _small_tensor(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the tensor that a rank sends, or receives into; None if it is not one that is
        delivered.
        """
        tensor = _single_tensor(arguments[_INPUTS[spec.name]]) if spec.name in _INPUTS else None
        if tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
            return None
        is_small = tensor.dtype in TYPES and tensor.numel() <= NUMBERS_MAX
        plain = tensor.layout is torch.strided
        return tensor if is_small and plain and not _called_by_torch() else None


def _rank_at(ranks: Ranks, place: Any) -> int:
    """Return the rank at a place of a group; -1 if there is none."""
    return ranks[place] if 0 <= place < len(ranks) else -1


def _single_tensor(value: Any) -> torch.Tensor | None:
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
    """Check whether torch itself makes a call, as in collectives of objects. ``objects.py``
    delivers these.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        code = frame.f_code
        kind = kind_of_file(code.co_filename)
        if code.co_filename.endswith(_PLUMBING):
            if "object" in code.co_name:
                return True
        elif kind is not FrameKind.COMMLENS:
            return kind is FrameKind.TORCH
    return False


def settled(gathered: Mapping[Key, Message | None]) -> set[GuessKind]:
    """Return the kinds of guesses that are confirmed if the ranks sent the same again. Guesses
    about objects are not among them where a gather used copies of the rank's own object, which is
    None here.
    """
    copied = any(
        message is None and not key[0].startswith(TENSOR) for key, message in gathered.items()
    )
    return {"exchange"} if copied else {"exchange", "object"}


# --- what the ranks give, as data


class Given(NamedTuple):
    """The tensor that one rank sends in a call."""

    op: str  # of c10d
    agreed: tuple[Any, ...]  # other arguments that must be equal on the ranks
    known: bool  # whether the rank decides the values alone, or knows all that they come from
    splits: tuple[int, ...]  # rows for each rank; empty: the same number for each
    tensor: torch.Tensor

    def pack(self) -> Message:
        """Return this as bytes."""
        tensor = self.tensor.detach().contiguous()
        about = (*self[:-1], tuple(tensor.shape), tensor.dtype)
        return [pickle.dumps(about), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()]


def unpack(message: Message) -> Given:
    """Return the tensor that :meth:`Given.pack` packed."""
    op, agreed, known, splits, shape, dtype = pickle.loads(message[0])
    tensor = torch.empty(shape, dtype=dtype)
    if message[1]:
        tensor = torch.frombuffer(bytearray(message[1]), dtype=dtype).reshape(shape)
    return Given(op, agreed, known, splits, tensor)


def result(given: Sequence[Given], place: int, outputs: Sequence[torch.Tensor]) -> bool:
    """Write the result of a collective into the outputs of the rank at ``place`` of the group, and
    return True. Write nothing and return False if the ranks' tensors do not fit together.
    """
    first = given[0]
    if any(
        (each.op, each.agreed, each.tensor.dtype) != (first.op, first.agreed, first.tensor.dtype)
        for each in given
    ):
        return False
    contents = _contents(given, place)
    if len(outputs) == 1 and len(contents) > 1:
        contents = [torch.cat([each.reshape(-1) for each in contents])]
    if [(each.numel(), each.dtype) for each in contents] != [
        (each.numel(), each.dtype) for each in outputs
    ]:
        return False
    for output, content in zip(outputs, contents, strict=True):
        output.copy_(content.view(output.shape))
    return True


def _contents(given: Sequence[Given], place: int) -> list[torch.Tensor]:
    """Return the tensors of a rank's result: one from each rank, or one reduced from all."""
    tensors = [each.tensor for each in given]
    if given[0].op == "allreduce_":
        return _reduced(tensors, given[0].agreed[0])
    if given[0].op != "alltoall_base_":
        return tensors
    parts = [_parts(each, len(given)) for each in given]
    return [] if None in parts else [each[place] for each in parts if each is not None]


def _parts(given: Given, ranks: int) -> Sequence[torch.Tensor] | None:
    """Return the part of a tensor for each rank; None if the splits do not fit the tensor."""
    rows = given.tensor.shape[0] if given.tensor.dim() else 0
    splits = given.splits or (rows // ranks,) * ranks
    return given.tensor.split(splits) if sum(splits) == rows and len(splits) == ranks else None


def _reduced(tensors: list[torch.Tensor], name: str | None) -> list[torch.Tensor]:
    """Return the reduced tensor in a list; an empty list if the shapes or the reduce op do not
    allow it.
    """
    if len({each.shape for each in tensors}) > 1:
        return []
    stacked, dtype = torch.stack(tensors), tensors[0].dtype
    if name in ("MAX", "MIN"):
        return [stacked.amax(0) if name == "MAX" else stacked.amin(0)]
    if name not in ("SUM", "PRODUCT") or dtype is torch.bool:
        return []
    return [stacked.sum(0, dtype=dtype) if name == "SUM" else stacked.prod(0, dtype=dtype)]
