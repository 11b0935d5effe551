"""Builds the sequences of ranks by hand, as a program would make them."""

from __future__ import annotations

from collections.abc import Callable

from commlens.check.sequence import Event, Issue, RankSequence, Setup, StoreCall, ThreadWait
from commlens.model.collective import (
    SETUP,
    STORE,
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    ProcessGroup,
    State,
    TensorSpec,
)
from commlens.model.ranklog import End

THREAD = 7


class Player:
    """One rank, which notes the calls that it makes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.sequence = RankSequence(rank, world_size)
        self.line = 0
        self._counts: dict[object, int] = {}
        self._channels: dict[str, Channel] = {}
        self._batch = 0

    def group(self, name: str = "0", ranks: tuple[int, ...] | None = None) -> Channel:
        """A group that exists; the world without a name."""
        if name not in self._channels:
            members = tuple(range(self.world_size)) if ranks is None else ranks
            self._channels[name] = Channel(ProcessGroup(name, members), "cpu")
        return self._channels[name]

    def new_group(self, name: str, *ranks: int) -> Channel:
        """Make a group, as ``new_group`` does."""
        call = Collective(
            0,
            Channel(ProcessGroup(name, ranks), SETUP),
            int(name),
            CollectiveArgs("new_group", "new_group"),
            State.ISSUED,
            0,
            stack=self._stack(),
            issue_thread=THREAD,
        )
        self._add(Setup(call))
        return self.group(name, ranks)

    def collective(
        self,
        op: str = "all_reduce",
        channel: Channel | None = None,
        *,
        elements: int = 4,
        root: int | None = None,
        reduce_op: str | None = "SUM",
        wait: bool = True,
    ) -> int:
        """Issue a collective, and wait for it."""
        channel = channel or self.group()
        spec = TensorSpec((elements,), "float32")
        args = CollectiveArgs(
            op, op, (spec,), reduce_op=reduce_op, root=root, asynchronous=not wait
        )
        return self._issue(channel, self._count(channel.key), args, wait=wait)

    def message(
        self,
        op: str,
        peer: int | None,
        *,
        channel: Channel | None = None,
        tag: int = 0,
        elements: int = 4,
        wait: bool = True,
    ) -> int:
        """Issue a send or a receive, and wait for it."""
        channel = channel or self.group()
        spec = TensorSpec((elements,), "float32")
        args = CollectiveArgs(op, op, (spec,))
        number = self._count((channel.key, op, peer))
        return self._issue(channel, number, args, peer=peer, tag=tag, wait=wait)

    def send(self, peer: int, *, tag: int = 0, elements: int = 4, wait: bool = True) -> int:
        return self.message("send", peer, tag=tag, elements=elements, wait=wait)

    def recv(self, peer: int | None, *, tag: int = 0, elements: int = 4, wait: bool = True) -> int:
        return self.message("recv", peer, tag=tag, elements=elements, wait=wait)

    def batch(self, *messages: tuple[str, int]) -> None:
        """Issue messages as ``batch_isend_irecv`` does, and wait for all."""
        self._batch += 1
        issued = []
        for op, peer in messages:
            issued.append(self.message(op, peer, wait=False))
            event = self.sequence.events[-1]
            assert isinstance(event, Issue)
            event.op.coalescing_id = self._batch
        for index in issued:
            self.wait(index)

    def wait(self, index: int) -> None:
        self._add(ThreadWait(index, THREAD))

    def store(self, op: str, key: str) -> None:
        """Call a method of the store: ``store.set``, ``store.get``."""
        ranks = () if op == "store.set" else tuple(range(self.world_size))
        call = Collective(
            0,
            Channel(ProcessGroup(key, ranks), STORE),
            1,
            CollectiveArgs(op, op),
            State.ISSUED,
            0,
            stack=self._stack(),
            issue_thread=THREAD,
        )
        self._add(StoreCall(call, (key,)))

    def raises(self, error: str) -> None:
        self.sequence.end, self.sequence.exit_code = End.FAILED, 1
        self.sequence.exception, self.sequence.exception_stack = error, self._stack()

    def _issue(
        self,
        channel: Channel,
        number: int,
        args: CollectiveArgs,
        *,
        wait: bool,
        peer: int | None = None,
        tag: int = 0,
    ) -> int:
        index = len(self.sequence.ops) + 1
        op = Collective(
            index,
            channel,
            number,
            args,
            State.ISSUED,
            0,
            stack=self._stack(),
            issue_thread=THREAD,
            peer=peer,
            tag=tag,
        )
        self._add(Issue(op))
        if wait:
            self.wait(index)
        return index

    def _count(self, key: object) -> int:
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    def _stack(self) -> tuple[Frame, ...]:
        self.line += 1
        return (Frame("/home/me/train.py", self.line, "main"),)

    def _add(self, event: Event) -> None:
        self.sequence.events.append(event)


def play(world_size: int, program: Callable[[Player], None]) -> dict[int, RankSequence]:
    """Return the sequences of all ranks of a program."""
    sequences = {}
    for rank in range(world_size):
        player = Player(rank, world_size)
        program(player)
        sequences[rank] = player.sequence
    return sequences
