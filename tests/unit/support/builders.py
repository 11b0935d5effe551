"""Makes rank logs without processes: runs one small program per rank with gloo's rules, and says
what each rank recorded.

A program is a generator of actions. A blocking collective ends when all of the group have issued
theirs and they fit; a send does not wait for its receive. When nobody can go on any more, time
passes, and the logs are what the boxes would hold.

    def program(job, rank):
        for _ in range(3):
            yield all_reduce(job.world, 100, line=10)
            yield step()

    logs = Job(4).run(program).logs()
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    LearnedHow,
    ProcessGroup,
    State,
    TensorSpec,
)
from commlens.model.ops import WIRE_OPS
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack

START = 1_700_000_000_000_000_000
MS = 1_000_000
S = 1_000_000_000
SCRIPT = "/home/me/train.py"
DISPATCHER = {wire: name for name, wire in reversed(WIRE_OPS.items())}


@dataclass(frozen=True)
class Op:
    """Issue a collective, or a point-to-point op; wait for it unless asynchronous."""

    group: ProcessGroup
    asked: CollectiveArgs
    line: int
    function: str = "step"
    peer: int | None = None
    tag: int = 0
    is_async: bool = False
    thread: int = 0
    cpp: bool = False  # waited for in C++: no recorded wait
    handle: str = ""
    callers: tuple[Frame, ...] = ()  # of the line's function, innermost first
    inner: tuple[Frame, ...] = ()  # of a library, between the line and torch's function


@dataclass(frozen=True)
class Wait:
    """Wait for an earlier asynchronous op."""

    handle: str


@dataclass(frozen=True)
class Step:
    """One optimizer step is complete."""


@dataclass(frozen=True)
class Stay:
    """Go nowhere from here: a data loader that hangs, a stopped process, ..."""

    line: int
    function: str
    observation: Observation | None = None
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Die:
    """End the process."""

    observation: Observation
    exception: str | None = None
    line: int = 0
    function: str = "step"
    closed: bool = False


Action = Op | Wait | Step | Stay | Die
Program = Callable[["Job", int], Iterator[Action]]


def spec(shape: int | tuple[int, ...], dtype: str = "float32", **more: object) -> TensorSpec:
    return TensorSpec(shape if isinstance(shape, tuple) else (shape,), dtype, **more)  # type: ignore[arg-type]


def asked(
    op: str, *inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), **more: object
) -> CollectiveArgs:
    """Return the arguments of a collective."""
    return CollectiveArgs(op, op, inputs, outputs, **more)  # type: ignore[arg-type]


def collective(
    op: str,
    group: ProcessGroup,
    shape: int | tuple[int, ...] = 8,
    *,
    line: int,
    function: str = "step",
    dtype: str = "float32",
    reduce_op: str | None = None,
    root: int | None = None,
    is_async: bool = False,
    cpp: bool = False,
    handle: str = "",
    thread: int = 0,
    callers: tuple[Frame, ...] = (),
) -> Op:
    tensor = spec(shape, dtype)
    asked = CollectiveArgs(
        op,
        DISPATCHER.get(op, op),
        () if op == "barrier" else (tensor,),
        (),
        reduce_op,
        root,
        asynchronous=is_async,
    )
    return Op(
        group,
        asked,
        line,
        function,
        is_async=is_async or cpp,
        cpp=cpp,
        handle=handle,
        thread=thread,
        callers=callers,
    )


def all_reduce(
    group: ProcessGroup,
    shape: int | tuple[int, ...] = 8,
    *,
    line: int,
    reduce_op: str | None = "SUM",
    **more: object,
) -> Op:
    return collective("all_reduce", group, shape, line=line, reduce_op=reduce_op, **more)  # type: ignore[arg-type]


def send(
    group: ProcessGroup,
    peer: int,
    shape: int = 8,
    *,
    line: int,
    tag: int = 0,
    dtype: str = "float32",
) -> Op:
    return Op(
        group, CollectiveArgs("send", "send", (spec(shape, dtype),)), line, peer=peer, tag=tag
    )


def recv(
    group: ProcessGroup,
    peer: int | None,
    shape: int = 8,
    *,
    line: int,
    tag: int = 0,
    dtype: str = "float32",
) -> Op:
    return Op(
        group, CollectiveArgs("recv", "recv_", (), (spec(shape, dtype),)), line, peer=peer, tag=tag
    )


@dataclass
class Rank:
    """One rank while the job runs."""

    rank: int
    program: Iterator[Action]
    log: RankLog
    numbers: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    handles: dict[str, Collective] = field(default_factory=dict)
    waiting: Collective | None = None
    unrecorded: bool = False  # it waits in C++
    over: bool = False
    frame: Frame | None = None
    stay: Stay | None = None


class Job:
    """A job of ``size`` ranks. ``groups`` name subsets; ``world`` is everybody."""

    def __init__(self, size: int, *, host: str = "n03", job: str = "job-1") -> None:
        self.size = size
        self.host = host
        self.name = job
        self.world = self.group("0", range(size), "default_pg")
        self.now = START
        self.ranks: list[Rank] = []
        self.met: dict[object, dict[int, Collective]] = defaultdict(dict)
        self.sent: dict[object, list[Collective]] = defaultdict(list)

    def group(
        self, name: str, ranks: object, description: str = "", backend: str = "gloo"
    ) -> ProcessGroup:
        return ProcessGroup(name, tuple(ranks), description or name, backend)  # type: ignore[call-overload]

    def run(self, program: Program, limit: int = 200_000) -> Job:
        for rank in range(self.size):
            log = RankLog(
                rank,
                self.size,
                self.name,
                self.host,
                1000 + rank,
                rank,
                initialised=True,
                script=SCRIPT,
                timeout_s=1800,
            )
            log.observation = Observation(End.RUNNING)
            self.ranks.append(Rank(rank, program(self, rank), log))
        moved = True
        while moved and limit:
            moved = False
            for one in self.ranks:
                limit -= 1
                while not one.over and one.waiting is None and one.stay is None:
                    moved = True
                    self._advance(one)
                moved = self._settle(one) or moved
        return self

    # --- one action

    def _advance(self, one: Rank) -> None:
        self.now += MS
        try:
            action = next(one.program)
        except StopIteration:
            one.over = True
            one.log.closed = True
            one.log.observation = Observation(End.CLEAN, 0, ended_ns=self.now)
            return
        if isinstance(action, Step):
            one.log.steps += 1
        elif isinstance(action, Stay):
            one.stay = action
            one.frame = Frame(SCRIPT, action.line, action.function)
        elif isinstance(action, Die):
            one.over = True
            one.log.observation = msgspec.structs.replace(action.observation, ended_ns=self.now)
            one.log.exception, one.log.closed = action.exception, action.closed
            if action.exception:
                one.log.exception_stack = (Frame(SCRIPT, action.line, action.function),)
            one.frame = Frame(SCRIPT, action.line, action.function) if action.line else None
        elif isinstance(action, Wait):
            op = one.handles.pop(action.handle)
            if op.state is State.ISSUED:
                op.wait_began_ns, op.wait_thread = self.now, one.log.pid
                one.waiting = op
        else:
            self._issue(one, action)

    def _issue(self, one: Rank, action: Op) -> None:
        channel = Channel(action.group, "cpu")
        pair = (
            (channel.key, action.peer, action.asked.op)
            if action.asked.op in ("send", "recv")
            else channel.key
        )
        one.numbers[pair] += 1
        log = one.log
        op = Collective(
            len(log.collectives) + 1,
            channel,
            one.numbers[pair],
            action.asked,
            State.ISSUED,
            self.now,
            self.now,
            self.now + 1000,
            stack=(
                Frame("/site/torch/distributed/c10d.py", 99, "wrapper", FrameKind.TORCH),
                *action.inner,
                Frame(SCRIPT, action.line, action.function),
                *action.callers,
            ),
            issue_thread=action.thread or log.pid,
            peer=action.peer,
            tag=action.tag,
            step=log.steps,
        )
        log.collectives.append(op)
        log.issued += 1
        if op.is_point_to_point:
            ends = (one.rank, action.peer) if op.op == "send" else (action.peer, one.rank)
            if op.peer is not None:
                self.sent[(channel.key, *ends, action.tag, op.op)].append(op)
            if op.op == "send":
                self._complete(op)
                return
        else:
            self.met[(channel.key, op.sequence_number)][one.rank] = op
        if action.cpp:
            one.waiting, one.unrecorded = op, True
        elif action.is_async:
            one.handles[action.handle] = op
        else:
            op.wait_began_ns, op.wait_thread = self.now, op.issue_thread
            one.waiting = op
        one.frame = Frame(SCRIPT, action.line, action.function)

    def _complete(self, op: Collective) -> None:
        op.state, op.done_ns, op.learned_how = State.COMPLETED, self.now, LearnedHow.WAIT
        if op.wait_began_ns:
            op.wait_ended_ns = self.now

    def _settle(self, one: Rank) -> bool:
        op = one.waiting
        if op is None or not self._fits(one.rank, op):
            return False
        self._complete(op)
        one.waiting, one.unrecorded = None, False
        return True

    def _fits(self, rank: int, op: Collective) -> bool:
        """Whether the backend would complete it now."""
        key = op.channel.key
        if op.op == "recv" and op.peer is None:
            return self._takes_any(rank, op)
        if op.op == "recv":
            mine = self.sent[(key, op.peer, rank, op.tag, "recv")]
            return len(self.sent[(key, op.peer, rank, op.tag, "send")]) > next(
                i for i, o in enumerate(mine) if o is op
            )
        met = self.met[(key, op.sequence_number)]
        root = op.args.root
        if op.op == "broadcast" and root in met and met[root].args.root == root:  # type: ignore[index]
            return met[root].args.inputs == op.args.inputs  # type: ignore[index]
        if set(met) != set(op.channel.group.ranks):
            return False
        # only the root has inputs
        tensors = {
            rank: o.args.outputs if o.op == "scatter" else o.args.inputs for rank, o in met.items()
        }
        sizes = {
            (o.op, o.args.root, tuple((s.numel, s.dtype) for s in tensors[rank]))
            for rank, o in met.items()
        }
        return len(sizes) == 1

    def _takes_any(self, rank: int, op: Collective) -> bool:
        """Give a receive from any source the first message that nobody takes, by rank as gloo."""
        key = op.channel.key
        for source in key[2]:
            taken = self.sent[(key, source, rank, op.tag, "recv")]
            if len(self.sent[(key, source, rank, op.tag, "send")]) > len(taken):
                taken.append(op)
                op.took_from = source
                return True
        return False

    # --- what is recorded

    def logs(self, *, after_s: float = 30.0, window_s: float = 10.0) -> list[RankLog]:
        """The logs ``after_s`` seconds after everything stood still."""
        captured = self.now + int(after_s * S)
        for one in self.ranks:
            log = one.log
            log.captured_ns = log.heartbeat_ns = log.stacks_ns = captured
            if log.observation.end is not End.RUNNING:
                log.heartbeat_ns = log.observation.ended_ns
                if one.frame is not None and not log.closed:
                    log.stacks = [
                        ThreadStack(log.pid, "MainThread", (one.frame,), log.heartbeat_ns, True)
                    ]
                continue
            log.main_stack_since_ns = self.now
            frames: tuple[Frame, ...] = (one.frame,) if one.frame is not None else ()
            if one.waiting is not None:
                frames = (
                    Frame("/site/torch/distributed/c10d.py", 99, "wait", FrameKind.TORCH),
                    *frames,
                )
            elif one.stay is not None:
                frames = (*one.stay.frames, *frames)
            log.stacks = [
                ThreadStack(
                    log.pid, "MainThread", (*frames, Frame(SCRIPT, 200, "main")), captured, True
                )
            ]
            still = Observation(
                End.RUNNING,
                seen_ns=captured,
                window_s=window_s,
                proc_state="S",
                cpu_s=0.01,
                io_bytes=0,
                stack_moved=False,
                holds_gil=False,
            )
            log.observation = (
                one.stay.observation
                if one.stay is not None and one.stay.observation is not None
                else still
            )
        return [one.log for one in self.ranks]


def training(
    fault: Callable[[Job, int, int], Iterator[object] | None], steps: int = 8
) -> Callable[[Job, int], Iterator[object]]:
    """A data parallel loop: load, all_reduce at line 20, all_gather of the loss at line 30.
    ``fault`` may replace a step's part.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(steps):
            replaced = fault(job, rank, i)
            if replaced is None:
                yield all_reduce(job.world, 100, line=20)
            else:
                yield from replaced
            yield collective("all_gather", job.world, 1, line=30)
            yield Step()

    return program


def at(
    rank: int, step: int, *actions: object
) -> Callable[[Job, int, int], Iterator[object] | None]:
    return lambda job, r, i: (
        iter([a(job) if callable(a) else a for a in actions]) if (r, i) == (rank, step) else None
    )


def mixed(
    fault: Callable[[Job, int, int], Iterator[object] | None],
) -> Callable[[Job, int], Iterator[object]]:
    """Collectives of every rank, and messages round the ring."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(5):
            yield from fault(job, rank, i) or [all_reduce(job.world, 100, line=20)]
            yield send(job.world, (rank + 1) % 4, 10, line=30)
            yield recv(job.world, (rank + 3) % 4, 10, line=31)
            yield Step()

    return program


def from_any_then_from_one(job: Job, rank: int) -> Iterator[object]:
    """Rank 0 takes a message from any rank, and then the one of rank 1."""
    if rank == 0:
        yield recv(job.world, None, line=10)
        yield recv(job.world, 1, line=11)
    else:
        yield send(job.world, 0, line=20 + rank)
    yield all_reduce(job.world, line=30)
