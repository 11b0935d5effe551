"""The recorder of a sequence: a subscriber of the tap, in a process that plays one rank.

It notes what a live rank's black box would hold, and every wait, in order. Tried on torch 2.13.0.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import msgspec
import torch
import torch.distributed.distributed_c10d as c10d

from commlens.blackbox.blobs import ArgsJson, decode_args
from commlens.blackbox.layout import FLAG_ANY_SOURCE
from commlens.check.sequence import Event, Guess, GuessKind, Issue, Leave, Setup, StoreCall, Wait
from commlens.model.collective import (
    SETUP,
    STORE,
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    ProcessGroup,
    Stack,
    State,
)
from commlens.model.hazard import Hazard, HazardKind
from commlens.model.ops import COALESCED, POINT_TO_POINT
from commlens.tap import tap, torch_patches
from commlens.tap.groups import Channel as TapChannel
from commlens.tap.groups import Groups
from commlens.tap.interned_args import (
    ArgsTable,
    InternedArgs,
    noted_reduce_ops,
    reduce_op_code,
)
from commlens.tap.made_groups import MadeGroups, ManyGroups
from commlens.tap.running_frames import kind_of_file
from commlens.tracing.patches import Patches, called_by_torch

_Tensor = torch.Tensor
_ENDED_BY_US = "commlens: the run ends here"


class GuessedRank(int):
    """The rank whose message a receive from any source took, which is a guess. It tells where the
    program uses it.
    """

    on_use: Callable[[], None]

    def __eq__(self, other: object) -> bool:
        """Compare it as a number."""
        self.on_use()
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        """Compare it as a number."""
        self.on_use()
        return int(self) != other

    def __hash__(self) -> int:
        """Same as for numbers."""
        return hash(int(self))


class EndOfRun(BaseException):
    """Ends the run of the program. ``except Exception`` does not catch it."""


class _Coalescing:
    """A coalesced group under construction by one thread."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.members: list[InternedArgs] = []
        self.sequence_number = 0

    def number_of(self, args: InternedArgs) -> int:
        """Return a member's sequence number: collectives share one, messages keep theirs."""
        self.members.append(args)
        if args.op in POINT_TO_POINT:
            return args.next_number()
        self.sequence_number = self.sequence_number or args.next_number()
        return self.sequence_number


class SequenceRecorder:
    """Records the events of one rank. It serves one run, in a process of its own: its patches of
    torch stay.
    """

    sees_fake_tensors = True
    verifier = None
    listens_to_waits = True
    reads_reduce_ops = False

    def __init__(self, *, steps: int | None = None) -> None:
        """End the run after ``steps`` optimizer steps; None: never."""
        self.events: list[Event] = []
        self.guesses: list[Guess] = []
        self.hazards = self
        self.groups = Groups()
        self.writer = types.SimpleNamespace(word=lambda *_: None)
        self.left = False
        self.cut_off = False
        self.stop_at_next_op = False  # which never completes: no other rank sends what it needs
        self.backend = ""  # of the default group, as the program names it
        self._steps_wanted = steps
        self._steps = 0
        self._args = ArgsTable()
        self._indices = itertools.count(1).__next__
        self._coalescing: dict[int, _Coalescing] = {}  # by thread
        self._coalescing_ids = itertools.count(1).__next__
        self._batch: dict[int, int] = {}  # by thread: the id of the batch under way
        self._works: dict[int, tuple[Any, int]] = {}  # by id: the Work, kept alive, and the index
        self._by_storage: dict[int, int] = {}  # storage of an output: index
        self._unwaited: dict[int, Stack] = {}  # indices of asynchronous ops
        self._futures: list[int] = []  # indices of ops whose future was taken
        self._not_a_member: dict[Stack, int] = {}
        self._made = MadeGroups()
        self._many_groups: list[ManyGroups] = []  # when the default group was destroyed
        self._channels: dict[tuple[TapChannel, str | None], Channel] = {}
        # Shared, so that they are written only once for all events.
        self._described: dict[tuple[InternedArgs, int | None], CollectiveArgs] = {}
        self._frames: dict[tuple[CodeType, int], Frame] = {}
        self._stacks: dict[Stack, Stack] = {}
        self._issuers: set[int] = set()  # threads
        self._mesh_device = ""
        self._setup_depth = 0
        self._inits = self._splits = self._meshes = 0
        self._mesh: str | None = None
        self._patches = Patches()

    def attach(self) -> None:
        """Start recording, inside a fake world."""
        wrap = self._patches.wrap
        wrap(c10d, "init_process_group", self._init)
        wrap(c10d, "_new_process_group_helper", self._new_group)
        wrap(c10d, "split_group", self._split)
        wrap(c10d, "destroy_process_group", self._destroy)
        wrap(c10d, "batch_isend_irecv", self._batched)
        wrap(c10d, "recv", self._recv)
        for name in ("send", "isend", "irecv"):
            wrap(c10d, name, self._with_peer)
        wrap(torch.autograd, "_engine_run_backward", self._backward)
        wrap(torch.autograd.graph, "_engine_run_backward", self._backward)
        import torch.distributed.device_mesh as device_mesh

        wrap(device_mesh, "init_device_mesh", self._init_mesh)
        for kind in (c10d.Work, *c10d.Work.__subclasses__()):
            wrap(kind, "get_future", self._take_future)
            wrap(kind, "is_completed", self._poll)
        torch_patches.set_recorder(self)  # type: ignore[arg-type]
        self._patches.replace_aliases()
        tap.attach(self)

    def detach(self) -> None:
        """Stop recording."""
        tap.detach(self)
        torch_patches.set_recorder(None)

    # --- the tap's calls

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> tuple[int, Any]:
        """Record an op. Raises the error of a backend that refuses its arguments."""
        group = self.groups.find(tap.unbox_group(arguments[spec.process_group]))
        args = self._args.find(spec, arguments, group)
        if args.refused_locally and not args.no_such_peer:
            raise ValueError(
                f"the backend would refuse this {args.op}: its arguments do not fit each other"
            )
        thread = threading.get_native_id()
        self._note_thread(thread)
        coalescing = self._coalescing.get(thread)
        number = args.next_number() if coalescing is None else coalescing.number_of(args)
        reduce_op = arguments[spec.reduce_op] if spec.reduce_op >= 0 else None
        index = self._issue(
            args,
            number,
            reduce_op if reduce_op is None else noted_reduce_ops.get(thread) or reduce_op,
            coalescing.id if coalescing is not None else self._batch.get(thread, 0),
        )
        outputs = None
        if coalescing is None and not args.meets:
            self._unwaited[index] = self._stack(sys._getframe(1))
            where = spec.writes or spec.tensors
            outputs = arguments[where[0]] if where else None
        if self.stop_at_next_op:
            self._add(Wait(index, thread))
            raise EndOfRun(_ENDED_BY_US)
        return index, outputs

    def returned(self, token: tuple[int, Any], result: Any) -> None:
        """Note the Work of an op, and the tensors that it will have written."""
        index, outputs = token
        boxed = result[-1] if type(result) is tuple else result
        if boxed is not None:
            work = tap.unbox_work(boxed)
            self._works[id(work)] = work, index
        elif threading.get_native_id() not in self._coalescing:
            self._waits(index)  # the call itself waits
        self._note_storages(outputs, index)

    def raised(self, token: tuple[int, Any], error: BaseException) -> None:
        """Ignore the errors of the fake backend."""

    def _note_thread(self, thread: int) -> None:
        self._issuers.add(thread)
        if len(self._issuers) > 1 and not any(each.what == "thread" for each in self.guesses):
            self.guess("thread")

    def _issue(
        self,
        args: InternedArgs,
        number: int,
        reduce_op: Any,
        coalescing: int,
        members: int = 0,
    ) -> int:
        index = self._indices()
        op = Collective(
            index,
            self._channel(args.channel),
            number,
            self._describe(args, reduce_op_code(reduce_op) if reduce_op is not None else None),
            State.ISSUED,
            0,
            stack=self._stack(sys._getframe(2)),
            issue_thread=threading.get_native_id(),
            peer=args.peer if args.op in POINT_TO_POINT and not _any_source(args) else None,
            tag=args.tag,
            step=self._steps,
            coalescing_id=coalescing,
            coalesced_members=members,
        )
        self._add(Issue(op))
        return index

    def _describe(self, args: InternedArgs, code: int | None) -> CollectiveArgs:
        found = self._described.get((args, code))
        if found is None:
            blob = msgspec.convert(args.content, ArgsJson)
            found = self._described[args, code] = decode_args(blob, 0 if code is None else code + 1)
        return found

    def _add(self, event: Event) -> None:
        """Add an event, unless the run has ended and only the program's exit handlers run."""
        if not self.cut_off:
            self.events.append(event)

    def _channel(self, channel: TapChannel) -> Channel:
        group = channel.group
        key = channel, group.mesh_dim
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = Channel(
                ProcessGroup(
                    group.name,
                    group.ranks,
                    group.description,
                    mesh_dim=group.mesh_dim,
                    incarnation=group.incarnation,
                ),
                channel.device,
            )
        return found

    def _note_storages(self, outputs: Any, index: int) -> None:
        if isinstance(outputs, _Tensor):
            if outputs.layout is torch.strided:
                self._by_storage[outputs.untyped_storage()._cdata] = index
        elif outputs is not None:
            for each in outputs:
                self._note_storages(each, index)

    # --- waits

    def tapped_wait(self, original: Any, slow: Any) -> Any:
        """Return the ``Work.wait`` to install."""
        return slow

    def wait_begins(self, work: Any) -> None:
        """A thread waits for a Work."""
        known = self._works.get(id(work))
        if known is not None:
            self._waits(known[1])

    def wait_ended(self, work: Any, token: Any, error: BaseException | None) -> None:
        """Nothing more: everything completes at once."""

    def tensor_wait_begins(self, tensor: Any) -> None:
        """A thread waits for the tensor of a functional collective."""
        index = self._by_storage.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._waits(index)

    def tensor_wait_ended(self, held: Any, error: BaseException | None) -> None:
        """Nothing more."""

    def _waits(self, index: int) -> None:
        self._unwaited.pop(index, None)
        self._add(Wait(index, threading.get_native_id(), self._stack(sys._getframe(2))))

    def handled(self, work: Any) -> None:
        """The program asks for the state of a Work: it need not wait for it."""
        known = self._works.get(id(work))
        if known is not None:
            self._unwaited.pop(known[1], None)

    def _poll(self, original: Any, work: Any) -> Any:
        known = self._works.get(id(work))
        if known is None or called_by_torch():
            return original(work)
        self.guess("poll")
        self._waits(known[1])
        return True  # the fake backend's Works never say so

    def _take_future(self, original: Any, work: Any) -> Any:
        known = self._works.get(id(work))
        if known is not None:
            self._unwaited.pop(known[1], None)
            self._futures.append(known[1])
        return original(work)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass: DDP's reducer waits at its end, in C++, for the futures of its
        buckets.
        """
        outer, self._futures = self._futures, []
        try:
            return original(*args, **kwargs)
        finally:
            for index in self._futures:
                self._waits(index)
            self._futures = outer

    # --- coalesced groups

    def coalescing_starts(self) -> None:
        """``ProcessGroup._start_coalescing`` was called."""
        self._coalescing[threading.get_native_id()] = _Coalescing(self._coalescing_ids())

    def coalescing_ends(self) -> int | None:
        """``ProcessGroup._end_coalescing`` was called."""
        group = self._coalescing.pop(threading.get_native_id(), None)
        if group is None or not group.members:
            return None
        first = group.members[0]
        return self._issue(
            InternedArgs({**first.content, "op": COALESCED, "dop": COALESCED}, first.channel),
            group.sequence_number,
            None,
            group.id,
            members=len(group.members),
        )

    def group_returned(self, token: int, work: Any) -> None:
        """``ProcessGroup._end_coalescing`` returned."""
        if work is None:
            self._waits(token)
        else:
            self._works[id(work)] = work, token

    def _batched(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the messages of a batch: NCCL issues them together."""
        thread = threading.get_native_id()
        self._batch[thread] = self._coalescing_ids()
        try:
            return original(*args, **kwargs)
        finally:
            del self._batch[thread]

    def _recv(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        source = self._with_peer(original, *args, **kwargs)
        event = next((each for each in reversed(self.events) if isinstance(each, Issue)), None)
        if event is None or event.op.op != "recv" or event.op.peer is not None:
            return source
        guessed = GuessedRank(source)
        guessed.on_use = lambda: self.guess("source")
        return guessed

    def _with_peer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, GuessedRank) for each in (*args, *kwargs.values())):
            self.guess("source")
        return original(*args, **kwargs)

    # --- groups

    def _init(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._inits += 1
        self.groups.started_again()
        asked = args[0] if args else kwargs.get("backend")
        default = "nccl" if self._mesh_device == "cuda" else ""
        self.backend = str(asked).lower() if asked is not None else default
        world = torch.distributed.get_world_size() if c10d.is_initialized() else 0
        size = world or _environment_world_size()
        self._setup("init_process_group", "default_pg", range(size), self._inits)
        self._setup_depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._setup_depth -= 1
        self.left = False
        return result

    def _new_group(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        name, ranks = str(args[5]), args[2] or ()
        if c10d.is_initialized():
            description = str(kwargs.get("group_desc") or "")
            number = int(name) if name.isdecimal() else 1
            self._setup(
                "new_group",
                name,
                ranks,
                max(number, 1),
                "" if description == "undefined" else description,
                self._mesh,
            )
            self._made.note(self._stack(sys._getframe(1)), ranks)
        return original(*args, **kwargs)

    def _split(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("parent_pg", "split_ranks"), args, strict=False)), **kwargs}
        parent = given.get("parent_pg") or c10d._get_default_group()
        self._splits += 1
        label = f"split_ranks={given.get('split_ranks')}"[:200]
        ranks = c10d.get_process_group_ranks(parent)
        self._setup("split_group", "split", ranks, self._splits, label=label)
        self._setup_depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._setup_depth -= 1

    def _init_mesh(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        shape = args[1] if len(args) > 1 else kwargs["mesh_shape"]
        names = kwargs.get("mesh_dim_names")
        self._mesh_device = str(args[0] if args else kwargs.get("device_type"))
        if not c10d.is_initialized():
            return self._named_mesh(original, shape, names, args, kwargs)
        self._meshes += 1
        size = torch.distributed.get_world_size()
        self._mesh = _mesh_label(shape, names)
        self._setup("init_device_mesh", "mesh", range(size), self._meshes, label=self._mesh)
        return self._named_mesh(original, shape, names, args, kwargs)

    def _named_mesh(
        self, original: Any, shape: Any, names: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        self._mesh = _mesh_label(shape, names)
        try:
            return original(*args, **kwargs)
        finally:
            self._mesh = None

    def _setup(
        self,
        op: str,
        name: str,
        ranks: Sequence[int],
        number: int,
        description: str = "",
        label: str | None = None,
    ) -> None:
        if self._setup_depth:
            return
        group = ProcessGroup(
            name,
            tuple(int(rank) for rank in ranks),
            description,
            incarnation=max(self._inits - 1, 0),
        )
        call = Collective(
            0,
            Channel(group, SETUP),
            number,
            CollectiveArgs(op, op),
            State.ISSUED,
            0,
            stack=self._stack(sys._getframe(2)),
            issue_thread=threading.get_native_id(),
            module=label,
        )
        self._add(Setup(call))

    def store_call(self, op: str, keys: tuple[str, ...]) -> None:
        """Note a call of the job's store."""
        ranks = () if op == "store.set" else tuple(range(torch.distributed.get_world_size()))
        call = Collective(
            0,
            Channel(ProcessGroup(keys[0], ranks, incarnation=max(self._inits - 1, 0)), STORE),
            1,
            CollectiveArgs(op, op),
            State.ISSUED,
            0,
            stack=self._stack(sys._getframe(2)),
            issue_thread=threading.get_native_id(),
            module=f"and {len(keys) - 1} more" if len(keys) > 1 else None,
        )
        self._add(StoreCall(call, keys))

    def _destroy(self, original: Any, group: Any = None) -> Any:
        is_last = group is None or group is c10d._world.default_pg
        name = "" if is_last else str(getattr(group, "group_name", ""))
        self._add(Leave(name, self._stack(sys._getframe(1))))
        self.groups.before_destroy()
        if is_last:
            self._many_groups += self._made.many()
        self.left = self.left or is_last
        return original(group)

    # --- torch's other events, for torch_patches

    @property
    def steps(self) -> int:
        """Optimizer steps completed."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        if self._steps_wanted is not None and steps >= self._steps_wanted:
            self.cut_off = True
            raise EndOfRun(_ENDED_BY_US)

    def not_a_member(self) -> None:
        """The rank called a collective of a group that it is not in: torch warns and does
        nothing.
        """
        stack = self._stack(sys._getframe(2))
        self._not_a_member[stack] = self._not_a_member.get(stack, 0) + 1

    def guess(self, what: GuessKind) -> None:
        """Note that the program asked for something that this rank alone cannot know."""
        self.guesses.append(Guess(what, self._stack(sys._getframe(2)), len(self.events)))

    # --- what was found

    def found_hazards(self) -> list[Hazard]:
        """Return the latent faults: Works never waited for, calls on groups of others, groups that
        pile up. What the program may still do if it goes on is none.
        """
        unwaited: dict[Stack, int] = {}
        for stack in self._unwaited.values():
            unwaited[stack] = unwaited.get(stack, 0) + 1
        kinds: tuple[tuple[HazardKind, dict[Stack, int]], ...] = (
            ("never-waited", unwaited if not self.cut_off else {}),
            ("not-a-member", self._not_a_member),
        )
        hazards = [
            Hazard(kind, times, stack) for kind, found in kinds for stack, times in found.items()
        ]
        if not self.cut_off:
            hazards += [
                Hazard("many-groups", many.times, many.maker, many.ranks)
                for many in self._many_groups
            ]
        return hazards

    def stack_of_traceback(self, trace: TracebackType | None) -> Stack:
        """Return the stack at which an exception was raised, innermost first."""
        frames: list[Frame] = []
        while trace is not None:
            frames.append(self._frame(trace.tb_frame.f_code, trace.tb_lineno))
            trace = trace.tb_next
        return tuple(reversed(frames))

    def stack_of_frame(self, frame: FrameType | None) -> Stack:
        """Return the stack whose innermost frame this is."""
        return self._stack(frame)

    def _stack(self, frame: FrameType | None) -> Stack:
        frames: list[Frame] = []
        while frame is not None:
            frames.append(self._frame(frame.f_code, frame.f_lineno or 0))
            frame = frame.f_back
        stack = tuple(frames)
        return self._stacks.setdefault(stack, stack)

    def _frame(self, code: CodeType, line: int) -> Frame:
        found = self._frames.get((code, line))
        if found is None:
            file = code.co_filename
            found = Frame(file, line, code.co_name, kind_of_file(file))
            self._frames[code, line] = found
        return found


def _any_source(args: InternedArgs) -> bool:
    return bool(args.flags & FLAG_ANY_SOURCE)


def _environment_world_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def _mesh_label(shape: Any, names: Any) -> str:
    named = f" named {', '.join(map(str, names))}" if names else ""
    return f"mesh {tuple(shape)}{named}"
