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

from commlens.check.branches import Answers
from commlens.check.exchange import settled
from commlens.check.objects import Need, SharedValues
from commlens.check.player import Player
from commlens.check.run_rank import Plan, Run, import_modules
from commlens.check.sequence import RankSequence
from commlens.tracing.preview.objects import Key, Message

_POLL_S = 0.2
_WAITING_MAX = 2 << 30  # bytes of memory that waiting processes may keep
_STARTS_MAX = 50  # starts of one rank that ended in a wait for another rank
_ROUNDS = 3  # of runs, until the ranks agree on the values that they must have alike


class RankProcesses:
    """Runs ranks, and gives each the objects that the others were seen to send."""

    def __init__(self, plan: Plan, *, ended: Callable[[RankSequence], None] | None = None) -> None:
        """Prepare to run a plan, on each CPU one rank at a time. ``ended`` is called with each
        complete sequence.
        """
        self._plan = plan
        self._at_once = len(os.sched_getaffinity(0))
        self._ended = ended or (lambda sequence: None)
        self._shared = SharedValues()
        self._answers: dict[int, Answers] = {}
        self._gathered: dict[int, dict[Key, Message | None]] = {}
        self._sequences: dict[int, RankSequence] = {}
        self._waiting: dict[int, Player] = {}
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
        """Return the sequences of these ranks. Run the ranks that were not run before, and the
        ranks that send objects to them. Run a rank again if it read a value that all ranks must
        have alike and got another one, or if it gathered other objects than the ranks now send.
        """
        wanted = sorted(set(ranks))
        self._run([rank for rank in wanted if rank not in self._sequences])
        for _ in range(_ROUNDS):
            self._shared.answers = common_answers(self._answers)
            odd = {*disagreeing(self._answers, self._shared.answers)} & self._sequences.keys()
            odd |= {rank for rank in self._sequences if self._gathered_others(rank)}
            if not odd:
                break
            self._run(sorted(odd))
        for rank in wanted:
            if not self._gathered_others(rank):
                sure, sequence = settled(self._gathered[rank]), self._sequences[rank]
                sequence.guesses = [each for each in sequence.guesses if each.what not in sure]
        return {rank: self._sequences[rank] for rank in wanted}

    def _gathered_others(self, rank: int) -> bool:
        """Check whether a rank gathered other objects than the ranks sent in their last runs."""
        return self._shared.differs(self._gathered[rank], self._sequences)

    def _run(self, ranks: list[int]) -> None:
        """Run ranks to their end, and those that send objects to them."""
        ended: dict[int, RankSequence] = {}
        needs: dict[int, Need] = {}
        starts: Counter[int] = Counter()
        # The first one shows what to import once for all.
        ready, later = ranks[:1], ranks[1:]
        try:
            while ready:
                # run all before the first result is added, so that the order of runs changes none
                for run in list(self._runs_of(ready)):
                    sequence, rank = run.sequence, run.sequence.rank
                    self._shared.add(run.sent, run.keys)
                    self._answers[rank], self._gathered[rank] = run.answers, run.gathered
                    starts[rank] += run.needs is not None and rank not in self._waiting
                    if starts[rank] == _STARTS_MAX:
                        sequence.problem = (
                            f"it was started {_STARTS_MAX} times, and still waits for another rank"
                        )
                    if later:
                        import_modules(run.modules)
                    if run.needs is not None and not sequence.problem:
                        needs[rank] = run.needs
                        continue
                    ended[rank] = sequence
                    if rank in ranks:
                        self._ended(sequence)
                if later:
                    self._shared.answers = common_answers(self._answers)
                ready, later = later or self._ready(needs, ended), []
                needs = {rank: need for rank, need in needs.items() if rank not in ready}
        finally:
            while self._waiting:
                self._waiting.popitem()[1].end()
        self._sequences.update((rank, ended[rank]) for rank in ranks)

    def _ready(self, needs: Mapping[int, Need], ended: Mapping[int, RankSequence]) -> list[int]:
        """Return the ranks to run next: the waiting ranks whose object or key is there now; else
        the ranks that send the missing objects; else all waiting ranks, since no rank gives what
        they need.
        """
        able = [rank for rank, need in needs.items() if self._shared.has(need)]
        senders = {need[1] for need in needs.values() if not isinstance(need, str)}
        senders -= ended.keys() | needs.keys()
        if not able and not senders:
            self._shared.never.update(needs.values())
        return sorted(able or senders or needs)

    def _runs_of(self, ranks: list[int]) -> Iterator[Run]:
        """Run some ranks, several at a time, and yield each run when it has ended or waits."""
        todo, players = list(reversed(ranks)), list[Player]()
        with _shared_pages():
            try:
                while todo or players:
                    while todo and len(players) < self._at_once:
                        players.append(self._player(todo.pop()))
                    readable = connection.wait([each.fileno() for each in players], _POLL_S)
                    for player in [each for each in players if each.fileno() in readable]:
                        run = player.receive()
                        players.remove(player)
                        self._keep_or_end(player)
                        yield run
                    for player in players:
                        if player.is_late():
                            player.kill()
            finally:
                for player in players:
                    player.end()

    def _player(self, rank: int) -> Player:
        """Start the process of a rank, or resume it if it waits."""
        player = self._waiting.pop(rank, None)
        if player is None:
            return Player(self._plan, rank, self._shared)
        player.resume(self._shared.of(rank))
        return player

    def _keep_or_end(self, player: Player) -> None:
        """Keep a process that waits, unless there is too little memory."""
        waiting = [player, *self._waiting.values()] if player.is_waiting else []
        if waiting and sum(each.memory() for each in waiting) <= _WAITING_MAX:
            self._waiting[player.rank] = player
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


def common_answers(answers: Mapping[int, Answers]) -> Answers:
    """Return one answer for all ranks to each read of a value that is the same on them: that of a
    rank that knows the value, else that of the first one.

    In a fake world each rank reads the content of its own buffer. If ranks read different ones,
    they would take branches that no real run takes.
    """
    found: Answers = {}
    for _, own in sorted(answers.items()):
        for key, given in own.items():
            known = found.setdefault(key, [])
            known += given[len(known) :]
            for place, answer in enumerate(given):
                if answer[1] and not known[place][1]:
                    known[place] = answer
    return found


def disagreeing(answers: Mapping[int, Answers], agreed: Answers) -> list[int]:
    """Return the ranks that got another answer somewhere."""
    return [
        rank
        for rank, own in sorted(answers.items())
        if any(
            repr(mine) != repr(theirs)  # NaN equals NaN
            for key, given in own.items()
            for (mine, _), (theirs, _) in zip(given, agreed[key], strict=False)
        )
    ]
