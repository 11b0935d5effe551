"""Run a program as every rank of a fake world, each in a forked process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from commlens.check.agreement import common, disagreeing
from commlens.check.branches import Answers
from commlens.check.exchange import settled
from commlens.check.objects import Need, Shared
from commlens.check.player import Player
from commlens.check.run_rank import Plan, Run, import_modules
from commlens.check.sequence import RankSequence
from commlens.tracing.preview.objects import Key, Message

_POLL_S = 0.2
_WAITING_MAX = 2 << 30  # bytes that processes have for themselves while they wait
_RUNS_MAX = 50  # of one rank
_ROUNDS = 3  # of runs until ranks agree on what they have alike


class Ranks:
    """Runs ranks, and gives each the objects that the others were seen to send."""

    def __init__(self, plan: Plan, *, ended: Callable[[RankSequence], None] | None = None) -> None:
        """Prepare to run a plan, on each CPU one rank at a time. ``ended`` is called with each
        complete sequence.
        """
        self._plan = plan
        self._at_once = len(os.sched_getaffinity(0))
        self._ended = ended or (lambda sequence: None)
        self._shared = Shared()
        self._answers: dict[int, Answers] = {}
        self._gathered: dict[int, dict[Key, Message | None]] = {}
        self._sequences: dict[int, RankSequence] = {}
        self._waiting: dict[int, Player] = {}
        self.outputs: dict[int, str] = {}
        """What the program printed, by rank."""

    def again(self, number: float) -> Ranks:
        """Return what runs the program again, knowing what the ranks gave each other, with another
        number where a fraction is read that is not known and is not followed.
        """
        other = Ranks(self._plan._replace(number=number))
        other._shared, other._answers = self._shared.copy(), dict(self._answers)
        return other

    @property
    def waited_in_vain(self) -> bool:
        """Whether a rank waits for a key of the store that none of those that were run writes."""
        return any(isinstance(need, str) for need in self._shared.never)

    def run(self, ranks: Iterable[int]) -> dict[int, RankSequence]:
        """Return the sequences of these ranks, and run those that were not run before. Runs as
        other ranks are added where those send objects to them. A rank is run again if it read
        something else than the others of a value that is the same on them, or if it gathered other
        objects than they give.
        """
        wanted = sorted(set(ranks))
        ran = self._sequences
        ran.update(self._run_all(set(wanted) - ran.keys()))
        for _ in range(_ROUNDS):
            self._shared.answers = common(self._answers)
            odd = set(disagreeing(self._answers, self._shared.answers)) & ran.keys()
            odd |= {rank for rank in ran if self._gathered_others(rank)}
            if not odd:
                break
            ran.update(self._run_all(odd))
        for rank in wanted:
            if not self._gathered_others(rank):
                sure, sequence = settled(self._gathered[rank]), ran[rank]
                sequence.guesses = [each for each in sequence.guesses if each.what not in sure]
        return {rank: ran[rank] for rank in wanted}

    def _gathered_others(self, rank: int) -> bool:
        """Check whether a rank gathered other objects than the ranks that were run give."""
        return self._shared.differs(self._gathered[rank], self._sequences)

    def _run_all(self, ranks: Iterable[int]) -> dict[int, RankSequence]:
        try:
            return self._run_until_done(sorted(set(ranks)))
        finally:
            for player in self._waiting.values():
                player.end()
            self._waiting.clear()

    def _run_until_done(self, wanted: list[int]) -> dict[int, RankSequence]:
        """Run ranks, and those that send objects to them. A process that waits for an object goes
        on when the object is known; if it would take too much memory meanwhile, the rank is run
        again from the start.
        """
        sequences: dict[int, RankSequence] = {}
        waiting: dict[int, Need] = {}
        restarts: Counter[int] = Counter()
        # The first one shows what to import once for all.
        todo, later = deque(wanted[:1]), wanted[1:]
        while todo or waiting:
            for run in self._run_each(todo):
                rank = run.sequence.rank
                self._shared.add(run.sent, run.keys)
                self._answers[rank] = run.answers
                self._gathered[rank] = run.gathered
                restarts[rank] += run.needs is not None and rank not in self._waiting
                if restarts[rank] == _RUNS_MAX:
                    run.sequence.problem = (
                        f"it needs something from others more than {_RUNS_MAX} times"
                    )
                if run.needs is None or run.sequence.problem:
                    sequences[rank] = run.sequence
                    if rank in wanted:
                        self._ended(run.sequence)
                else:
                    waiting[rank] = run.needs
                if later:
                    import_modules(run.modules)
                    self._shared.answers = common(self._answers)
            todo, later = deque(later or self._next(waiting, set(sequences))), []
            waiting = {rank: need for rank, need in waiting.items() if rank not in todo}
        return {rank: sequences[rank] for rank in wanted}

    def _next(self, waiting: dict[int, Need], done: set[int]) -> list[int]:
        """Return the ranks to run next: those that can go on, else those that send what others
        need, else all that wait: they do so for ever.
        """
        able = [rank for rank, need in waiting.items() if self._shared.has(need)]
        if able:
            return sorted(able)
        sources = {need[1] for need in waiting.values() if not isinstance(need, str)}
        if sources := sources - done - set(waiting):
            return sorted(sources)
        self._shared.never.update(waiting.values())
        return sorted(waiting)

    def _run_each(self, todo: deque[int]) -> list[Run]:
        """Run some ranks, several at a time, each until it ends or waits."""
        runs: list[Run] = []
        players: dict[int, Player] = {}
        with selectors.DefaultSelector() as selector, _shared_pages():
            try:
                while todo or players:
                    while todo and len(players) < self._at_once:
                        player = self._start(todo.popleft())
                        players[player.rank] = player
                        selector.register(player, selectors.EVENT_READ, player)
                    for selected, _ in selector.select(_POLL_S):
                        player = selected.data
                        run = player.receive()
                        if run is not None:
                            runs.append(run)
                            selector.unregister(player)
                            self._keep_or_end(players.pop(player.rank))
                    for player in players.values():
                        if player.is_late():
                            player.kill()
            finally:
                for player in players.values():
                    player.end()
        return runs

    def _start(self, rank: int) -> Player:
        player = self._waiting.pop(rank, None)
        if player is None:
            return Player(self._plan, rank, self._shared)
        player.go_on(self._shared.of(rank))
        return player

    def _keep_or_end(self, player: Player) -> None:
        """Keep a process that waits, unless there is too little memory."""
        waits = player.needs is not None
        if waits and player.memory() + self._memory_of_waiting() <= _WAITING_MAX:
            self._waiting[player.rank] = player
            return
        if text := player.end():
            self.outputs[player.rank] = text

    def _memory_of_waiting(self) -> int:
        return sum(player.memory() for player in self._waiting.values())


@contextlib.contextmanager
def _shared_pages() -> Iterator[None]:
    """Let the garbage collectors of the processes that are forked meanwhile leave what is here now
    alone. It would have to be copied for each of them.
    """
    if gc.get_freeze_count():  # the program's own doing, which stays
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
