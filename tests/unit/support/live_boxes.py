"""Black boxes that are read while they fill up: from the byte-by-byte builder, in memory, without
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from boxes import MONO, REDUCE_OP, UNIX, Box

from commlens.blackbox.copy import read_parts
from commlens.blackbox.header import Identity, read_identity
from commlens.blackbox.layout import REDUCE_OPS
from commlens.blackbox.rank_log import BoxReader
from commlens.model.collective import Collective, CollectiveArgs, TensorSpec
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.text import format_ranks
from commlens.watch.mismatches.deferred_verification import DeferredVerification
from commlens.watch.mismatches.report import MismatchReporter

COALESCED, CLOSES, CONCURRENT, ENTERED, ANY_SOURCE = 1, 2, 4, 8, 16


class Memory:
    """What :class:`commlens.blackbox.reader.OpenBox` is to a tail, on a box in memory."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.name = box.name

    @property
    def identity(self) -> Identity:
        return read_identity(self.read(0, 4096), self.name)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.box.data[offset : offset + length])


class Rank:
    """One rank that records. It counts sequence numbers as the recorder does."""

    def __init__(self, rank: int, world_size: int, *, capacity: int = 64) -> None:
        self.rank = rank
        self.box = Box(rank, world_size, capacity=capacity, pid=4000 + rank)
        self.blobs: dict[object, int] = {}
        self.numbers: dict[object, int] = {}
        self.undecoded: list[tuple[int, str]] = []
        self.beats = 0

    def blob(self, content: object, make: Callable[[], int]) -> int:
        key = repr(content)
        if key not in self.blobs:
            self.blobs[key] = make()
        return self.blobs[key]

    def issue(
        self,
        asked: CollectiveArgs,
        *,
        ranks: Sequence[int] = (0, 1, 2, 3),
        group: str = "0",
        inc: int = 0,
        backend: str = "gloo",
        device: str = "cpu",
        line: int = 81,
        step: int = 0,
        peer: int = -1,
        tag: int = 0,
        flags: int = ENTERED,
        number: int | None = None,
        coalescing: int = 0,
        members: int = 0,
        stack: bool = True,
    ) -> int:
        """Announce one. Its reduce op is not there before :meth:`beat`."""
        box = self.box
        where = {
            "name": group,
            "ranks": format_ranks(ranks),
            "backend": backend,
            "device": device,
            "inc": inc,
        }
        group_at = self.blob(
            where, lambda: box.group(group, where["ranks"], device=device, inc=inc, backend=backend)
        )
        content = {
            "k": "asked",
            "op": asked.op,
            "dop": asked.dispatcher_op,
            "in": _tensors(asked.inputs),
            "out": _tensors(asked.outputs),
            "rop": None,
            "root": asked.root,
            "is": list(asked.input_splits),
            "os": list(asked.output_splits),
            "async": asked.asynchronous,
        }
        asked_at = self.blob(content, lambda: box.blob(content))
        stack_at = (
            self.blob(("stack", line), lambda: box.stack(("/home/me/train.py", line, "step")))
            if stack
            else 0
        )
        if number is None:
            key = (repr(where), peer, asked.op if asked.op in ("send", "recv") else "")
            number = self.numbers[key] = self.numbers.get(key, 0) + 1
        index = box.record(
            group=group_at,
            asked=asked_at,
            stack=stack_at,
            seq=number,
            step=step,
            peer=peer,
            tag=tag,
            flags=flags,
            coalescing_id=coalescing,
            members=members,
        )
        if asked.reduce_op:
            self.undecoded.append((index, asked.reduce_op))
        return index

    def replay(self, op: Collective) -> None:
        """Issue what another recorder recorded."""
        group = op.channel.group
        index = self.issue(
            op.args,
            ranks=group.ranks,
            group=group.name,
            inc=group.incarnation,
            backend=group.backend,
            device=op.channel.device,
            line=op.source.line if op.source else 0,
            step=op.step,
            peer=-1 if op.peer is None else op.peer,
            tag=op.tag,
            number=op.sequence_number,
        )
        if op.state.value == "completed":
            self.box.complete(index)

    def coalesce(self, *members: CollectiveArgs, number: int, coalescing: int) -> None:
        """A coalesced group: its members, and the record that closes it."""
        for asked in members:
            self.issue(asked, number=number, coalescing=coalescing, flags=ENTERED | COALESCED)
        closing = CollectiveArgs("coalesced", "coalesced")
        self.issue(
            closing,
            number=number,
            coalescing=coalescing,
            flags=ENTERED | CLOSES,
            members=len(members),
        )

    def beat(self) -> None:
        """The watchdog thread's round: a heartbeat, and reduce ops."""
        self.begin_round()
        self.read_reduce_ops()

    def begin_round(self) -> None:
        self.beats += 1
        self.box.heartbeat(MONO + self.beats * 250_000_000, UNIX + self.beats * 250_000_000)

    def read_reduce_ops(self) -> None:
        for index, name in self.undecoded:
            if index + self.box.capacity > self.box.index:
                self.box.value(index, REDUCE_OP, REDUCE_OPS.index(name) + 1)
        self.undecoded.clear()

    def log(self, newest: int | None = None) -> RankLog:
        content = self.box.bytes()
        parts = read_parts(
            lambda offset, length: content[offset : offset + length],
            len(content),
            self.box.name,
            live=False,
            newest=newest,
        )
        return BoxReader(parts, self.box.name, None).log(newest)


class Node:
    """All ranks of a node, compared as the watcher does. The tests set the time."""

    def __init__(self, size: int, *, world_size: int = 0, capacity: int = 64) -> None:
        self.ranks = [Rank(rank, world_size or size, capacity=capacity) for rank in range(size)]
        self.members = [
            SimpleNamespace(
                pid=each.box.pid,
                rank=each.rank,
                world_size=len(self.ranks),
                box=Memory(each.box),
                alive=True,
                ended_well=None,
            )
            for each in self.ranks
        ]
        roster = SimpleNamespace(current=lambda: self.members)
        self.verification = DeferredVerification(roster, clock=lambda: 0.0)  # type: ignore[arg-type]
        self.reporter = MismatchReporter(
            self.verification, roster, read=lambda newest: [rank.log(newest) for rank in self.ranks]
        )  # type: ignore[arg-type]
        self.now = 0.0
        self.said: list[tuple[Verdict, bool]] = []

    def look(self, *, after: float = 0.1) -> list[Verdict]:
        self.now += after
        said = self.reporter.poll(self.now)
        self.said += said
        return [verdict for verdict, _ in said]

    def all(self, asked: CollectiveArgs, **more: object) -> None:
        for rank in self.ranks:
            rank.issue(asked, **more)  # type: ignore[arg-type]

    def settle(self) -> list[Verdict]:
        """A watchdog's round on every rank, and looks until nothing more can come of it."""
        said = self.look()
        for _ in range(2):
            for rank in self.ranks:
                rank.beat()
            said += self.look(after=1.2)
        return said + self.look(after=1.2)


def tensor(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def all_reduce(*shape: int, op: str = "SUM", dtype: str = "float32") -> CollectiveArgs:
    return CollectiveArgs(
        "all_reduce", "allreduce_", (tensor(*(shape or (8,)), dtype=dtype),), reduce_op=op
    )


def send(*shape: int) -> CollectiveArgs:
    return CollectiveArgs("send", "send", (tensor(*shape),))


def recv(*shape: int) -> CollectiveArgs:
    return CollectiveArgs("recv", "recv_", (), (tensor(*shape),))


def _tensors(specs: Sequence[TensorSpec]) -> list[object]:
    return [
        [
            list(s.shape),
            s.dtype,
            s.device,
            s.layout,
            list(s.memory_order) if s.memory_order else None,
        ]
        for s in specs
    ]
