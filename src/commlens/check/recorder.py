"""Record what one rank of a checked program does, in order: a subscriber of the tap, in a process
that plays the rank. Nothing is sent, and every collective completes at once.

The result is a :class:`~commlens.check.sequence.RankSequence`. For example, of ::

    dist.init_process_group("gloo")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.barrier()
    dist.destroy_process_group()

the events are ``Setup(init_process_group)``, ``Issue(all_reduce, index 1)``, ``ThreadWait(1)``,
``Issue(barrier, index 2)``, ``ThreadWait(2)``, ``Leave("")``. A collective has the same facts as in
a live rank's black box, so the same rules judge it.

What this run cannot know is noted beside the events: a *guess* is a value that the rank alone
cannot know (``Work.is_completed``: taken as true), and what is *unseen* happens in a real run and
not in this one (the program asks for another world size). Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed.distributed_c10d as c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from commlens.blackbox.blobs import ArgsJson, decode_args
from commlens.blackbox.layout import FLAG_ANY_SOURCE
from commlens.check.notes import RankNotes
from commlens.check.sequence import Issue, RankSequence, ThreadWait, Unseen, UnseenKind
from commlens.check.setup_calls import SetupCalls
from commlens.matching.refusals import BACKENDS, refuses
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    ProcessGroup,
    Stack,
    State,
    user_frame,
)
from commlens.model.frames import FrameKind
from commlens.model.hazard import Hazard
from commlens.model.ops import COALESCED, POINT_TO_POINT
from commlens.tap import tap, torch_patches
from commlens.tap.cuda_graphs import is_capturing
from commlens.tap.groups import Groups
from commlens.tap.groups import LiveChannel as TapChannel
from commlens.tap.interned_args import (
    ArgsTable,
    CoalescedGroup,
    InternedArgs,
    reduce_op_code,
    reduce_op_name,
)
from commlens.tap.rejections import will_be_refused
from commlens.text import count
from commlens.tracing.in_flight.operands import tensors_in
from commlens.tracing.patches import Patches, called_by_torch

_LIBRARY_STEPS = {
    ("torch/nn/parallel/distributed.py", "_sync_buffers"): "DDP's broadcast of buffers",
    ("torch/nn/parallel/distributed.py", "_pre_forward"): "DDP's rebuilding of its buckets",
    ("ddp_comm_hooks/default_hooks.py", "_allreduce_fut"): "a bucket of DDP's gradients",
    ("torch/distributed/utils.py", "_verify_param_shape_across_processes"): (
        "the comparison of a model's parameters between ranks"
    ),
    ("torch/distributed/utils.py", "_sync_module_states"): "a model's first parameters",
    ("_flat_param.py", "_all_gather_flat_param"): "the parameters of a unit of FSDP",
    ("fsdp/_runtime_utils.py", "_reduce_grad"): "the gradients of a unit of FSDP",
    ("_fsdp_collectives.py", "foreach_all_gather"): "the parameters of a block of FSDP2",
    ("_fsdp_collectives.py", "foreach_reduce"): "the gradients of a block of FSDP2",
    ("tensor/_redistribute.py", "redistribute_local_tensor"): "a redistribution of a DTensor",
}
"""By file and function of torch: what it issues collectives for. Tried on torch 2.13.0."""

_ENDED_BY_US = "commlens: the run ends here"
_COMPILER_SETTINGS: tuple[tuple[UnseenKind, str, str], ...] = (
    ("sizes", "torch._dynamo.config", "enable_compiler_collectives"),
    ("partitioner", "torch._functorch.config", "_sync_decision_cross_ranks"),
    ("autotuning", "torch._inductor.config", "distributed_max_autotune_gemm"),
)
"""The settings with which torch.compile issues collectives of its own."""


class GuessedRank(int):
    """The rank that ``dist.recv()`` without a source returns: a guess. It reports that the program
    compares it: the guess counts only if the program depends on it.
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


class SequenceRecorder(tap.WaitSubscriber):
    """Records the events of one rank. It serves one run, in a process of its own: its patches of
    torch stay.
    """

    sees_fake_tensors = True

    def __init__(
        self,
        sequence: RankSequence,
        *,
        steps: int | None = None,
        cpu_s: float | None = None,
        backend: str = "",
    ) -> None:
        """Fill ``sequence``. End the run after ``steps`` optimizer steps, or at the first one after
        ``cpu_s`` seconds of CPU time; None: never. Its calls are refused by the rules of
        ``backend``; empty: of the one that the program names.
        """
        self.notes = RankNotes(sequence)
        self.groups = Groups()
        self.setup_calls = SetupCalls(self.notes, self.groups)
        # Set once the program needs what no other rank gives it: its next op never completes.
        self.stop_at_next_op = False
        self._rules = backend
        self._steps_wanted = math.inf if steps is None else steps
        self._ends_at_s = math.inf if cpu_s is None else time.process_time() + cpu_s
        self._args = ArgsTable()
        self._indices = itertools.count(1).__next__
        self._coalescing: dict[int, CoalescedGroup] = {}  # by thread
        self._coalescing_ids = itertools.count(1).__next__
        self._batch: dict[int, int] = {}  # by thread: the id of the batch under way
        self._works: dict[Any, int] = {}  # by Work, which is kept alive: the index of its op
        self._by_storage: dict[int, int] = {}  # storage of an output: index
        self._unwaited: dict[int, Stack] = {}  # by index of an asynchronous op: where it was issued
        self._futures: list[int] = []  # of this backward pass: ops whose future was taken
        self._not_a_member: Counter[Stack] = Counter()
        self._issuers: set[int] = set()  # threads
        self._compiled_at: Frame | None = None  # the first call of torch.compile
        self._agreed: tuple[UnseenKind, ...] = ()  # guards, with set_enable_guard_collectives

    def attach(self) -> None:
        """Start recording, inside a fake world."""
        patches = Patches()
        wrap = patches.wrap
        self.setup_calls.attach(patches)
        wrap(c10d, "batch_isend_irecv", self._batched)
        wrap(c10d, "recv", self._recv)
        for name in ("send", "isend", "irecv"):
            wrap(c10d, name, self._with_peer)
        wrap(c10d, "_warn_not_in_group", self._not_in_group)
        wrap(torch.autograd, "_engine_run_backward", self._backward)
        wrap(torch.autograd.graph, "_engine_run_backward", self._backward)
        wrap(torch, "compile", self._compile)
        wrap(torch.cuda.CUDAGraph, "capture_begin", self._capture)
        wrap(torch.compiler, "set_enable_guard_collectives", self._guard_together)
        for kind in (c10d.Work, *c10d.Work.__subclasses__()):
            wrap(kind, "get_future", self._take_future)
            wrap(kind, "is_completed", self._poll)
        register_optimizer_step_post_hook(self._stepped)
        torch_patches.add_tracer(self)
        torch_patches.add_work_listener(self)
        patches.replace_aliases()
        tap.attach(self)

    def detach(self) -> None:
        """Stop recording."""
        tap.detach(self)
        torch_patches.remove_tracer(self)
        torch_patches.remove_work_listener(self)
        if self._compiled_at is not None:
            switched_on = (
                what
                for what, module, setting in _COMPILER_SETTINGS
                if getattr(sys.modules.get(module), setting, False)
            )
            self.notes.sequence.unseen += [
                Unseen(what, self._compiled_at) for what in (*self._agreed, *switched_on)
            ]

    # --- the tap's calls

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> tuple[int, Any] | None:
        """Record an op, and return its index and the tensors that it writes. Return None for an op
        of a group that the program made by hand, of which the global ranks are unknown.

        Raises:
            RuntimeError: the backend of a real run refuses the arguments.
            EndOfRun: the op never completes.
        """
        group = self.groups.find(tap.unbox_group(arguments[spec.process_group]))
        if group.hand_made is not None:
            self.notes.note_unseen("group", count(group.size, "rank"))
            return None
        args = self._args.find(spec, arguments, group)
        thread = threading.get_native_id()
        reduce_op = arguments[spec.reduce_op] if spec.reduce_op >= 0 else None
        if reduce_op is not None:
            reduce_op = torch_patches.noted_reduce_ops.get(thread) or reduce_op
        self._refuse(args, reduce_op, group.size)
        self._issuers.add(thread)
        was_guessed = any(each.what == "thread" for each in self.notes.sequence.guesses)
        if len(self._issuers) > 1 and not was_guessed:
            self.notes.guess("thread")  # a real run may issue their ops in another order
        coalescing = self._coalescing.get(thread)
        number = args.next_number() if coalescing is None else coalescing.add(args)
        index = self._issue(
            args,
            number,
            reduce_op,
            coalescing.id if coalescing is not None else self._batch.get(thread, 0),
        )
        outputs = None
        if coalescing is None and not args.meets:
            self._unwaited[index] = self.notes.stack()
            where = spec.writes or spec.tensors
            outputs = arguments[where[0]] if where else None
        if self.stop_at_next_op:
            self.notes.add(ThreadWait(index, thread))
            raise EndOfRun(_ENDED_BY_US)
        return index, outputs

    def returned(self, token: tuple[int, Any] | None, result: Any) -> None:
        """Note by which Work, and by which tensors, a thread may wait for an op later on."""
        if token is None:
            return
        index, outputs = token
        boxed = result[-1] if type(result) is tuple else result
        if boxed is not None:
            self._works[tap.unbox_work(boxed)] = index
        elif threading.get_native_id() not in self._coalescing:
            self._waits(index)  # without a Work, the call itself waits
        # wait_tensor() of a functional collective is given a view of an output
        for tensor in tensors_in(outputs):
            if tensor.layout is torch.strided:
                self._by_storage[tensor.untyped_storage()._cdata] = index

    def _refuse(self, args: InternedArgs, reduce_op: Any, size: int) -> None:
        """Raise an error if each backend that may run the call refuses it. There are several if the
        program names none, or two as in ``"cpu:gloo,cuda:nccl"``.
        """
        name = reduce_op_name(reduce_op) or ""
        asked = self._rules or self.notes.sequence.backend
        named = [backend for backend in BACKENDS if backend in asked]
        backends = named or (() if asked else BACKENDS)
        reasons = [self._refusal(args, name, size, backend) for backend in backends]
        if reasons and all(reasons):
            raise RuntimeError(f"{reasons[0]} (found by commlens check)")

    def _refusal(self, args: InternedArgs, reduce_op: str, size: int, backend: str) -> str:
        """Return why a backend refuses a call; empty if it does not."""
        if args.misaddressed and not args.no_such_peer:
            return f"{backend} refuses this {args.op}: there is no such rank or tag"
        if will_be_refused(args.content, size, backend):
            return f"{backend} refuses this {args.op}: its tensors do not fit each other"
        for tensor in (*args.content["in"], *args.content["out"]):
            if refuses(backend, args.op, tensor[1], reduce_op):
                with_op = f"{args.op} with {reduce_op}" if reduce_op else args.op
                return f"{backend} has no {with_op} of {tensor[1]} tensors"
        return ""

    def _issue(
        self,
        args: InternedArgs,
        number: int,
        reduce_op: Any,
        coalescing: int,
        members: int = 0,
    ) -> int:
        """Add the event of an op, and return its index.

        Args:
            args: its arguments.
            number: its sequence number.
            reduce_op: the dispatcher's object; None: it reduces nothing.
            coalescing: id of the coalesced group or batch that it is in; 0: of none.
            members: ops in the coalesced group that this op closes.
        """
        if is_capturing():
            self.notes.note_unseen("graph")
        index = self._indices()
        stack = self.notes.stack()
        op = Collective(
            index,
            _channel(args.channel, args.channel.group.mesh_dim),
            number,
            _described(args, reduce_op_code(reduce_op) if reduce_op is not None else None),
            State.ISSUED,
            0,
            stack=stack,
            issue_thread=threading.get_native_id(),
            peer=(
                args.peer
                if args.op in POINT_TO_POINT and not args.flags & FLAG_ANY_SOURCE
                else None
            ),
            tag=args.tag,
            step=self.notes.sequence.steps,
            coalescing_id=coalescing,
            coalesced_members=members,
            module=_library_step(stack),
        )
        self.notes.add(Issue(op))
        return index

    # --- waits

    def wait_begins(self, work: Any) -> None:
        """Note that a thread begins to wait for a Work. It ends at once."""
        if index := self._works.get(work):
            self._waits(index)

    def tensor_wait_begins(self, tensor: Any) -> None:
        """A thread waits for the tensor of a functional collective."""
        index = self._by_storage.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._waits(index)

    def _waits(self, index: int) -> None:
        """Note that this thread waits for an op."""
        self._unwaited.pop(index, None)
        self.notes.add(ThreadWait(index, threading.get_native_id()))

    def used_without_wait(self, work: Any) -> None:
        """Note that the program asked for the state of a Work: it need not wait."""
        self._unwaited.pop(self._works.get(work, 0), None)

    def _poll(self, original: Any, work: Any) -> Any:
        """Answer ``Work.is_completed()`` of the program with a guess: yes. The Works of the fake
        backend always say no, and a program that polls until it is yes would not end.
        """
        index = self._works.get(work)
        if index is None or called_by_torch():
            return original(work)
        self.notes.guess("poll")
        self._waits(index)
        return True

    def _take_future(self, original: Any, work: Any) -> Any:
        """Note that the program, or a hook of DDP, takes ``Work.get_future()``."""
        self.used_without_wait(work)
        if index := self._works.get(work):
            self._futures.append(index)
        return original(work)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass. At its end DDP's reducer waits, in C++ where no tap sees it, for the
        futures that its hooks have taken of the buckets' collectives.
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
        self._coalescing[threading.get_native_id()] = CoalescedGroup(self._coalescing_ids())

    def coalescing_ended(self, work: Any) -> None:
        """``ProcessGroup._end_coalescing`` was called, and returned the Work of the group."""
        group = self._coalescing.pop(threading.get_native_id(), None)
        if group is None or not group.members:
            return
        first = group.members[0]
        index = self._issue(
            InternedArgs({**first.content, "op": COALESCED, "dop": COALESCED}, first.channel),
            group.sequence_number,
            None,
            group.id,
            members=len(group.members),
        )
        if work is None:
            self._waits(index)
        else:
            self._works[work] = index

    def _batched(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Give the messages of ``batch_isend_irecv`` one id: NCCL issues them together."""
        thread = threading.get_native_id()
        self._batch[thread] = self._coalescing_ids()
        try:
            return original(*args, **kwargs)
        finally:
            del self._batch[thread]

    def _recv(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the source of ``dist.recv()``; as a guess, if it receives from any source."""
        source = self._with_peer(original, *args, **kwargs)
        events = reversed(self.notes.sequence.events)
        last = next((each.op for each in events if isinstance(each, Issue)), None)
        is_from_any = last is not None and last.op == "recv" and last.peer is None
        if not is_from_any:
            return source
        guessed = GuessedRank(source)
        guessed.on_use = lambda: self.notes.guess("source")
        return guessed

    def _with_peer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that sends or receives. Its peer may be a guessed rank: the program
        answers the rank from which it received.
        """
        if any(isinstance(each, GuessedRank) for each in (*args, *kwargs.values())):
            self.notes.guess("source")
        return original(*args, **kwargs)

    # --- the compiler

    def _compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the first call of ``torch.compile``."""
        self._compiled_at = self._compiled_at or user_frame(self.notes.stack())
        return original(*args, **kwargs)

    def _capture(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Note a CUDA graph: its replays run nothing here."""
        self.notes.guess("graph")
        original(*args, **kwargs)

    def _guard_together(self, original: Any, enabled: bool) -> Any:
        """Note ``set_enable_guard_collectives``: the ranks then agree on what to compile anew."""
        self._agreed = ("guards",) if enabled else self._agreed
        return original(enabled)

    # --- steps, and what was found

    def _stepped(self, *_: Any) -> None:
        """Count an optimizer step. The run ends when it has had its steps or its CPU time."""
        sequence = self.notes.sequence
        sequence.steps += 1
        sequence.out_of_time = time.process_time() > self._ends_at_s
        if sequence.out_of_time or sequence.steps >= self._steps_wanted:
            sequence.cut_off = True
            raise EndOfRun(_ENDED_BY_US)

    def _not_in_group(self, original: Any, *args: Any) -> Any:
        """Note that the rank called a collective of a group that it is not in. torch warns and does
        nothing.
        """
        self._not_a_member[self.notes.stack()] += 1
        return original(*args)

    def found_hazards(self) -> list[Hazard]:
        """Return the latent faults: Works never waited for, calls on groups of others, groups that
        pile up. A fault that the program may still mend after the end of the run is left out.
        """
        hazards = [
            Hazard("not-a-member", times, stack) for stack, times in self._not_a_member.items()
        ]
        if self.notes.sequence.cut_off:
            return hazards
        unwaited = Counter(self._unwaited.values())
        return [
            *(Hazard("never-waited", times, stack) for stack, times in unwaited.items()),
            *hazards,
            *(
                Hazard("many-groups", many.times, many.maker, many.ranks)
                for many in self.setup_calls.many_groups
            ),
        ]


# The same objects for all events, so that they are written only once.
@functools.cache
def _described(args: InternedArgs, code: int | None) -> CollectiveArgs:
    return decode_args(msgspec.convert(args.content, ArgsJson), 0 if code is None else code + 1)


@functools.cache
def _channel(channel: TapChannel, mesh_dim: str | None) -> Channel:
    group = channel.group
    return Channel(
        ProcessGroup(
            group.name,
            group.members,
            group.description,
            mesh_dim=mesh_dim,
            incarnation=group.incarnation,
        ),
        channel.device,
    )


@functools.lru_cache(maxsize=4096)
def _library_step(stack: Stack) -> str | None:
    """Return the step of a library in which a collective is issued that the user did not write."""
    for frame in itertools.takewhile(lambda frame: frame.kind is not FrameKind.USER, stack):
        for (file, function), step in _LIBRARY_STEPS.items():
            if frame.function == function and frame.file.endswith(file):
                return step
    return None
