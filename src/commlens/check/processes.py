"""Run a program as every rank of a fake world, each in a forked process of its own.

A process that needs an object of another rank waits until that rank's process has sent it. A rank
is run again from its start only if a value that it assumed turned out to be wrong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import connection

from commlens.check.branches import Answers, common_answers, disagreeing
from commlens.check.exchange import settled
from commlens.check.objects import Need, SharedValues
from commlens.check.player import Player
from commlens.check.run_rank import Plan, Run, import_modules
from commlens.check.sequence import RankSequence
from commlens.tracing.preview.objects import Key, Message

_POLL_S = 0.2
_WAITING_MAX = 2 << 30  # bytes of memory that waiting processes may keep
_STARTS_MAX = 50  # starts of one rank that ended in a wait, its process not kept
_ROUNDS = 3  # of runs, until the ranks agree on the values that they must have alike


class RankProcesses:
    """Runs ranks, and gives each the objects that the others were seen to send.

    A rank is ready, runs, and then has ended or needs an object or a key of another rank. The
    process of a rank that needs something is kept; without memory for that, the rank starts again.
    """

    def __init__(self, plan: Plan, *, ended: Callable[[RankSequence], None] | None = None) -> None:
        """Prepare to run a plan, on each CPU one rank at a time. ``ended`` is called with each
        complete sequence, again if the rank is run again.
        """
        self._plan = plan
        self._at_once = len(os.sched_getaffinity(0))
        self._ended = ended or (lambda sequence: None)
        self._shared = SharedValues()
        self._answers: dict[int, Answers] = {}
        self._gathered: dict[int, dict[Key, Message | None]] = {}
        self._sequences: dict[int, RankSequence] = {}
        self._kept: dict[int, Player] = {}
        self.outputs: dict[int, str] = {}
        """The program's output, by rank."""

    def with_number(self, number: float) -> RankProcesses:
        """Return new processes with the same shared values. Where a program reads a float that a
        rank alone cannot know, it gets ``number``.
        """
        other = RankProcesses(self._plan._replace(number=number))
        other._shared, other._answers = copy.deepcopy(self._shared), dict(self._answers)
        return other

    @property
    def waited_in_vain(self) -> bool:
        """Whether a rank waits for a key of the store that no rank writes, as far as ranks were
        run.
        """
        return any(isinstance(need, str) for need in self._shared.never)

    def sequences_of(self, ranks: Iterable[int]) -> dict[int, RankSequence]:
        """Return the sequences of these ranks.

        Run the ranks that were not run before, and the ranks that send objects to them. Then run a
        rank again if it read a value that all ranks must have alike and got another one, or if it
        gathered other objects than the ranks now send; if that is so after the last round, it keeps
        its guesses.
        """
        wanted = sorted(set(ranks))
        self._run([rank for rank in wanted if rank not in self._sequences])
        for _ in range(_ROUNDS):
            self._shared.answers = common_answers(self._answers)
            to_rerun = {*disagreeing(self._answers, self._shared.answers)} & self._sequences.keys()
            to_rerun |= {rank for rank in self._sequences if self._gathers_are_outdated(rank)}
            if not to_rerun:
                break
            self._run(sorted(to_rerun))
        for rank in wanted:
            if not self._gathers_are_outdated(rank):
                sure, sequence = settled(self._gathered[rank]), self._sequences[rank]
                sequence.guesses = [each for each in sequence.guesses if each.what not in sure]
        return {rank: self._sequences[rank] for rank in wanted}

    def _gathers_are_outdated(self, rank: int) -> bool:
        """Check whether a rank gathered other objects than the ranks sent in their last runs."""
        return self._shared.differs(self._gathered[rank], self._sequences)

    def _run(self, ranks: list[int]) -> None:
        """Run ranks to their end, and those that send objects to them. The sequences of senders
        that are not among ``ranks`` are not kept.
        """
        ended: dict[int, RankSequence] = {}
        needs: dict[int, Need] = {}
        starts: Counter[int] = Counter()

        def run_batch(batch: list[int]) -> list[Run]:
            # the whole batch before its results are shared: else the order in which its ranks
            # finish would change them
            runs = self._runs_of(batch)
            for run in runs:
                sequence, rank = run.sequence, run.sequence.rank
                self._shared.add(run.sent, run.keys)
                self._answers[rank], self._gathered[rank] = run.answers, run.gathered
                starts[rank] += run.needs is not None and rank not in self._kept
                if starts[rank] == _STARTS_MAX:
                    sequence.problem = (
                        f"it was started {_STARTS_MAX} times, and still waits for another rank"
                    )
                if run.needs is not None and not sequence.problem:
                    needs[rank] = run.needs
                    continue
                ended[rank] = sequence
                if rank in ranks:
                    self._ended(sequence)
            return runs

        ready = ranks
        try:
            if len(ranks) > 1:
                # the first one alone: it shows what to import once for all
                for run in run_batch(ranks[:1]):
                    import_modules(run.modules)
                self._shared.answers = common_answers(self._answers)
                ready = ranks[1:]
            while ready:
                run_batch(ready)
                ready = self._take_ready(needs, ended)
        finally:
            while self._kept:
                self._kept.popitem()[1].end()
        self._sequences.update((rank, ended[rank]) for rank in ranks)

    def _take_ready(self, needs: dict[int, Need], ended: Mapping[int, RankSequence]) -> list[int]:
        """Return the ranks to run next, and take them out of ``needs``: those whose object or key
        is there now; else the ranks that send the missing objects; else all that need something,
        since no rank gives it.
        """
        able = [rank for rank, need in needs.items() if self._shared.has(need)]
        senders = {need[1] for need in needs.values() if not isinstance(need, str)}
        senders -= ended.keys() | needs.keys()
        if not able and not senders:
            self._shared.never.update(needs.values())
        ready = sorted(able or senders or needs)
        for rank in ready:
            needs.pop(rank, None)
        return ready

    def _runs_of(self, ranks: list[int]) -> list[Run]:
        """Run some ranks, several at a time, until each has ended or needs something."""
        todo, players, runs = list(reversed(ranks)), list[Player](), list[Run]()
        with _shared_pages():
            try:
                while todo or players:
                    while todo and len(players) < self._at_once:
                        players.append(self._player(todo.pop()))
                    readable = connection.wait([each.fileno() for each in players], _POLL_S)
                    for player in [each for each in players if each.fileno() in readable]:
                        runs.append(player.receive())
                        players.remove(player)
                        self._keep_or_end(player)
                    for player in players:
                        if player.is_late():
                            player.kill()
            finally:
                for player in players:
                    player.end()
        return runs

    def _player(self, rank: int) -> Player:
        """Start the process of a rank, or resume it if it waits."""
        player = self._kept.pop(rank, None)
        if player is None:
            return Player(self._plan, rank, self._shared)
        player.resume(self._shared.of(rank))
        return player

    def _keep_or_end(self, player: Player) -> None:
        """Keep a process that waits, unless there is too little memory."""
        waiting = [player, *self._kept.values()] if player.is_waiting else []
        if waiting and sum(each.memory() for each in waiting) <= _WAITING_MAX:
            self._kept[player.rank] = player
        elif text := player.end():
            self.outputs[player.rank] = text


@contextlib.contextmanager
def _shared_pages() -> Iterator[None]:
    """Hide the present objects from the garbage collectors of the processes forked meanwhile: a
    collection would copy the objects' memory for each process.
    """
    is_frozen = gc.get_freeze_count() > 0  # the program's own doing, which stays
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
