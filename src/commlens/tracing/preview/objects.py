"""Object collectives of a fake world, where no other rank exists to send an object.

Objects that this rank sends are handled by torch. An object from another rank is learned by running
the program as that rank up to the send (see ``preview.py``). The tensors that carry it are filled
at the tap, so torch's own functions run unchanged. Gathered objects are assumed to equal this
rank's own. Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from commlens.tap import tap
from commlens.tracing.patches import Patches
from commlens.tracing.preview.tensors import run_on_real_tensors

Key = tuple[str, int, int | None, tuple[int, ...], int]
"""Identifies a message: function, global source rank, destination rank if any, the group's ranks,
and the number of the call, from 1.
"""

Message = list[bytes]
"""Pickled objects."""

Deliver = Callable[[dict[str, Any], tuple[int, ...]], contextlib.AbstractContextManager[None]]
"""Takes a call's arguments by name and the group's ranks. Returns a context in which torch's
function receives its objects.
"""


class Objects(tap.Subscriber):
    """The object collectives of one run."""

    def __init__(
        self, rank: int, learned: Mapping[Key, Message | None], stop_at: Key | None
    ) -> None:
        """Play a rank that knows some messages from others; None stands for those that could not be
        learned in earlier runs.

        The program is ended when it sends the message ``stop_at``, or needs a message that is not
        known. SystemExit does so: a thread that it ends prints nothing, and ``except Exception``
        does not catch it.
        """
        self.rank = rank
        self.learned = learned
        self.stop_at = stop_at
        self.kept: Message | None = None
        """The message ``stop_at``, once the program has sent it."""
        self.unknown: Key | None = None
        """The first message that this rank needs and does not know."""
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._deliveries = _Deliveries()

    def install(self, patches: Patches) -> None:
        """Wrap torch's functions."""
        patches.set(c10d, "_pickler", _Pickler)
        for name in ("all_gather_object", "gather_object"):
            patches.wrap_named(c10d, name, self._gather)
        for name, deliver in (
            ("broadcast_object_list", self._broadcast),
            ("scatter_object_list", self._scatter),
            ("send_object_list", self._send),
            ("recv_object_list", self._receive),
        ):
            patches.wrap_named(c10d, name, functools.partial(self._run, deliver))
        tap.attach(self)

    def remove(self) -> None:
        """Detach from the tap."""
        tap.detach(self)

    def delivering(
        self, *contents: torch.Tensor | bytes
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the next receiving collectives receive these contents."""
        tensors = [
            (
                torch.frombuffer(bytearray(each), dtype=torch.uint8)
                if isinstance(each, bytes)
                else each
            )
            for each in contents
        ]
        return self._deliveries.delivering([*tensors])

    def delivering_gathered(self, messages: Message) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the gathers of an object collective receive the sizes of these
        messages, then the messages.
        """
        sizes = [_as_tensor(len(each)) for each in messages]
        contents = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in messages]
        return self._deliveries.delivering([], gathered=[sizes, contents])

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Any:
        """Return a function that fills the op's tensors, if it delivers anything."""
        deliveries = self._deliveries
        if deliveries.gathered and spec.name in ("allgather_", "gather_", "_allgather_base_"):
            contents = deliveries.gathered.pop(0)
            if spec.name == "_allgather_base_":  # of torch 2.15's all_gather_object: one tensor
                outputs = arguments[0].view(-1).chunk(len(contents))
            else:
                outputs = arguments[0][0] if arguments[0] else ()
            return lambda: list(map(_fill, outputs, contents))
        if deliveries.pending and spec.name in (
            "broadcast_",
            "scatter_",
            "recv_",
            "recv_any_source_",
        ):
            content = deliveries.pending.pop(0)
            return None if content is None else lambda: _fill(arguments[0], content)
        return None

    def returned(self, token: Any, result: Any) -> None:
        """Fill the tensors."""
        if token is not None:
            token()

    # --- the wrappers

    def _gather(self, original: Any, given: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            return original(**given)

    def _run(self, deliver: Deliver, original: Any, given: dict[str, Any]) -> Any:
        """Call torch's function in a context in which it receives the objects that other ranks
        send; in a group of others it does nothing.
        """
        ranks = ranks_of(given.get("group"))
        if self.rank not in ranks:
            return original(**given)
        with unset_fake_temporarily(), deliver(given, ranks):
            return original(**given)

    def _broadcast(
        self, given: dict[str, Any], ranks: tuple[int, ...]
    ) -> contextlib.AbstractContextManager[None]:
        source = _global(given, "src")
        key = self._key("broadcast", source, None, ranks)
        if source != self.rank:
            return self._delivering_objects(key, given)
        self._keep(key, pickled(given["object_list"], given))
        return contextlib.nullcontext()

    def _scatter(
        self, given: dict[str, Any], ranks: tuple[int, ...]
    ) -> contextlib.AbstractContextManager[None]:
        source, objects = _global(given, "src"), given.get("scatter_object_input_list")
        if source == self.rank and objects and len(objects) == len(ranks):
            messages = pickled(objects, given)
            largest = len(max(messages, key=len))
            for rank, message in zip(ranks, messages, strict=True):
                self._keep(self._key("scatter", source, rank, ranks), [message, b"\0" * largest])
            mine = messages[ranks.index(self.rank)]
        else:
            known = self._message(self._key("scatter", source, self.rank, ranks))
            mine, largest = known[0], len(known[1])
        return self.delivering(
            _as_tensor(largest), mine.ljust(largest, b"\0"), _as_tensor(len(mine))
        )

    def _send(
        self, given: dict[str, Any], ranks: tuple[int, ...]
    ) -> contextlib.AbstractContextManager[None]:
        self._keep(
            self._key("send", self.rank, _global(given, "dst"), ranks),
            pickled(given["object_list"], given),
        )
        return contextlib.nullcontext()

    def _receive(
        self, given: dict[str, Any], ranks: tuple[int, ...]
    ) -> contextlib.AbstractContextManager[None]:
        # Torch 2.6 receives from any rank, which is assumed to be the previous one.
        from_any = given.get("src") is None and given.get("group_src") is None
        source = ranks[ranks.index(self.rank) - 1] if from_any else _global(given, "src")
        return self._delivering_objects(self._key("send", source, self.rank, ranks), given)

    def _delivering_objects(
        self, key: Key, given: dict[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        message = self._message(key)
        sizes = torch.tensor([len(each) for each in message], dtype=torch.long)
        return self.delivering(sizes, b"".join(message))

    # --- messages

    def _key(self, kind: str, source: int, destination: int | None, ranks: tuple[int, ...]) -> Key:
        call = (kind, source, destination, ranks)
        self._counts[call] += 1
        return (*call, self._counts[call])

    def _keep(self, key: Key, message: Message) -> None:
        if key == self.stop_at:
            self.kept = message
            raise SystemExit

    def _message(self, key: Key) -> Message:
        message = self.learned.get(key)
        if message is None:
            self.unknown = self.unknown or key
            raise SystemExit
        return message


class _Pickler(pickle.Pickler):
    """Pickles fake tensors, which have no data, as zeros."""

    def reducer_override(self, obj: Any) -> Any:
        """Replace a fake tensor."""
        if isinstance(obj, FakeTensor):
            return torch.zeros(obj.shape, dtype=obj.dtype).__reduce_ex__(2)
        return NotImplemented


class _Deliveries(threading.local):
    """The contents for the tensors of this thread's current object collective, in order; None
    leaves a tensor alone.
    """

    def __init__(self) -> None:
        self.pending: list[torch.Tensor | None] = []
        self.gathered: list[list[torch.Tensor]] = []  # one for each rank of the group

    @contextlib.contextmanager
    def delivering(
        self,
        contents: list[torch.Tensor | None],
        *,
        gathered: list[list[torch.Tensor]] | None = None,
    ) -> Iterator[None]:
        self.pending, self.gathered = contents, gathered or []
        try:
            yield
        finally:
            self.pending, self.gathered = [], []


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group, of the default one for None."""
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return ()
    return tuple(
        c10d.get_process_group_ranks(group if group is not None else c10d._get_default_group())
    )


def _global(given: dict[str, Any], name: str) -> int:
    """Return the global rank that a call names as ``src`` and ``group_src``, or ``dst`` and
    ``group_dst``.
    """
    group_rank, rank = given.get(f"group_{name}"), given.get(name)
    if group_rank is not None:
        ranks = ranks_of(given.get("group"))
        return int(ranks[group_rank] if 0 <= group_rank < len(ranks) else group_rank)
    return rank if rank is not None else 0


def pickled(objects: list[Any], given: dict[str, Any]) -> Message:
    """Pickle objects as the object collective with these arguments does."""
    options = {"weights_only": given["weights_only"]} if given.get("weights_only") else {}
    group = c10d._get_default_group()
    return [
        c10d._object_to_tensor(each, torch.device("cpu"), group, **options)[0].numpy().tobytes()
        for each in objects
    ]


def _as_tensor(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.long)


def _fill(target: Any, content: torch.Tensor) -> None:
    tensor = target[0] if isinstance(target, (list, tuple)) else target
    flat = tensor.view(-1)
    amount = min(flat.numel(), content.numel())
    flat[:amount].copy_(content[:amount])


def deliver_votes(patches: Patches, objects: Objects) -> None:
    """Let stages of a pipeline vote on how to learn their shapes: the other stages are assumed to
    vote as this one does.

    The vote passes from stage to stage in torch 2.13.0 and through an all-reduce in 2.15.0; 2.6.0
    has no vote. The shapes are sent as objects.
    """
    from torch.distributed.pipelining import PipelineStage, schedules

    votes: dict[int, int] = {}

    def forward_vote(
        original: Any, stage: Any, has_backward: bool, received_acc: Any = None
    ) -> Any:
        with unset_fake_temporarily(), objects.delivering(torch.ones(1, dtype=torch.int32)):
            own = original(stage, has_backward, received_acc)
            votes[id(stage)] = int(own.item())
        return own

    def backward_result(original: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        with (
            unset_fake_temporarily(),
            objects.delivering(torch.tensor([votes.pop(id(stage), 0)], dtype=torch.int32)),
        ):
            return original(stage, *args, **kwargs)

    patches.wrap(PipelineStage, "_warmup_forward_vote", forward_vote)
    patches.wrap(PipelineStage, "_warmup_backward_result", backward_result)
    for schedule in (schedules._PipelineSchedule, *_subclasses(schedules._PipelineSchedule)):
        patches.wrap(schedule, "_initialize_pipeline_distributed_state", run_on_real_tensors)


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    found: list[type[Any]] = kind.__subclasses__()
    return found + [each for one in found for each in _subclasses(one)]
