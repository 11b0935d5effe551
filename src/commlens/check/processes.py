"""Run a program as every rank of a fake world, each in a forked process of its own.

A rank gets a value of another rank, which was perhaps not run yet, in one of two ways:

* It **waits**: if rank 1 calls ``broadcast_object_list(src=0)``, its process is kept until that of
  rank 0 has sent the object. Objects and keys of the store are waited for, since a rank cannot go
  on without them.
* It **guesses and is rerun**: if rank 0 gathers an object of rank 1, it goes on with a copy of its
  own object, and is run again from its start if rank 1 then sends another one. So it is with
  objects that are gathered, because of a large world not all ranks that give one are run; and with
  small tensors, because to wait for each would make all processes pause, though few tensors decide
  anything.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import Pipe, connection
from pathlib import Path

from commlens.check.branches import Answers, common_answers, disagreeing
from commlens.check.exchange import settled
from commlens.check.objects import Need, SharedValues
from commlens.check.run_rank import Plan, Run, import_modules, run_rank
from commlens.check.sequence import RankSequence
from commlens.model.ranklog import End
from commlens.text import signal_name
from commlens.tracing.preview.objects import Key, Message

_POLL_S = 0.2
_WAITING_MAX = 2 << 30  # bytes of memory that waiting processes may keep
_STARTS_MAX = 50  # starts of one rank that ended in a wait, its process not kept
_ROUNDS = 3  # of runs, until the ranks agree on the values that they must have alike


class RankProcesses:
    """Runs ranks, and gives each the objects that the others were seen to send.

    A rank is ready, runs, and then has ended or needs an object or a key of another rank. The
    process of a rank that needs something is kept and goes on later. If there is too little memory
    to keep it, the rank is run again from its start, too.
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
        """What each rank read of the values that all ranks must read alike: a tensor after an
        all_reduce.
        """
        self._gathered: dict[int, dict[Key, Message | None]] = {}
        """What each rank received without waiting; None: it was not known, so the rank guessed."""
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
        self._run_to_end([rank for rank in wanted if rank not in self._sequences])
        for _ in range(_ROUNDS):
            self._shared.answers = common_answers(self._answers)
            to_rerun = {*disagreeing(self._answers, self._shared.answers)} & self._sequences.keys()
            to_rerun |= {rank for rank in self._sequences if self._gathers_are_outdated(rank)}
            if not to_rerun:
                break
            self._run_to_end(sorted(to_rerun))
        for rank in wanted:
            if not self._gathers_are_outdated(rank):
                # the ranks sent again what this one gathered, so those guesses are confirmed
                confirmed, sequence = settled(self._gathered[rank]), self._sequences[rank]
                sequence.guesses = [each for each in sequence.guesses if each.what not in confirmed]
        return {rank: self._sequences[rank] for rank in wanted}

    def _gathers_are_outdated(self, rank: int) -> bool:
        """Check whether a rank gathered other objects than the ranks sent in their last runs."""
        return self._shared.differs(self._gathered[rank], self._sequences)

    def _run_to_end(self, ranks: list[int]) -> None:
        """Run ranks to their end, and those that send objects to them. The sequences of senders
        that are not among ``ranks`` are not kept.
        """
        complete: dict[int, RankSequence] = {}
        needs: dict[int, Need] = {}
        starts: Counter[int] = Counter()

        def run_batch(batch: list[int]) -> list[Run]:
            # the whole batch before its results are shared: else the order in which its ranks
            # finish would change them
            runs = self._run_until_they_wait(batch)
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
                complete[rank] = sequence
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
                ready = self._take_ready(needs, complete)
        finally:
            while self._kept:
                self._kept.popitem()[1].end()
        self._sequences.update((rank, complete[rank]) for rank in ranks)

    def _take_ready(
        self, needs: dict[int, Need], complete: Mapping[int, RankSequence]
    ) -> list[int]:
        """Return the ranks to run next, and take them out of ``needs``: those whose object or key
        is there now; else the ranks that send the missing objects; else all that need something,
        since no rank gives it.
        """
        able = [rank for rank, need in needs.items() if self._shared.has(need)]
        senders = {need[1] for need in needs.values() if not isinstance(need, str)}
        senders -= complete.keys() | needs.keys()
        if not able and not senders:
            self._shared.never.update(needs.values())
        ready = sorted(able or senders or needs)
        for rank in ready:
            needs.pop(rank, None)
        return ready

    def _run_until_they_wait(self, ranks: list[int]) -> list[Run]:
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


# --- one process

_OUTPUT_MAX = 200_000  # bytes of a rank's output that are read
_PR_SET_PDEATHSIG = 1
_GRACE_S = 15.0  # after the run's own time limit, until its process is killed
_LINK_S = 10  # the longest pause of a process within a message
_exit = os._exit  # before the program's os._exit is replaced


class Player:
    """A process that plays a rank."""

    def __init__(self, plan: Plan, rank: int, shared: SharedValues) -> None:
        """Fork the process. It has the values that other ranks have shared up to now."""
        self.rank = rank
        self.is_waiting = False
        """Whether it waits for an object or a key of another rank."""
        self._plan = plan
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._link, its_link = Pipe()
        with socket.socket(fileno=os.dup(self._link.fileno())) as link:
            link.setblocking(True)  # else the program's default timeout holds for the pipe, too
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                link.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", _LINK_S, 0))
        _flush()
        self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                self._link.close()
                self._play(its_link, shared)
            _exit(1)
        its_link.close()
        self._set_deadline()

    def fileno(self) -> int:
        """Return the descriptor that is readable when the process has sent its run or ended."""
        return self._link.fileno()

    def receive(self) -> Run:
        """Return the run that the process sends when it waits or is complete. If it has died, or
        stops while it sends, return an empty run with the reason.
        """
        try:
            run: Run = pickle.loads(self._link.recv_bytes())
        except BlockingIOError:
            return self._lost_run(f"its process paused for {_LINK_S} s while it sent its sequence")
        except Exception:
            return self._lost_run()
        self.is_waiting = run.needs is not None
        return run

    def resume(self, shared: SharedValues) -> None:
        """Let a waiting process go on, with the values that other ranks have shared."""
        self._set_deadline()
        self.is_waiting = False
        # an error: the process has ended, as receive() will find, or is stopped until it is late
        with contextlib.suppress(OSError):
            _send(self._link, shared)

    def is_late(self) -> bool:
        """Check whether the process must be killed."""
        return time.monotonic() > self._deadline

    def _set_deadline(self) -> None:
        """Set when to kill the process. A run ends by itself before that; its own time limit does
        not count the time for which it waits.
        """
        self._deadline = time.monotonic() + self._plan.timeout_s + _GRACE_S

    def memory(self) -> int:
        """Return the bytes that the process shares with no other one; 0 if they are unknown."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{self._pid}/smaps_rollup").read_text().splitlines()
            return 1024 * sum(int(each.split()[1]) for each in lines if "Private_" in each)
        return 0

    def kill(self) -> None:
        """Kill the process and its own processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill and reap the process, and return the program's output. Call nothing afterwards."""
        self.kill()
        os.waitpid(self._pid, 0)
        self._link.close()
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_MAX))
            return output.read().decode(errors="replace")

    def _lost_run(self, problem: str = "") -> Run:
        """Kill the process, and return the empty run of a process that did not send its own.

        Args:
            problem: why it did not; empty: it was late or died.
        """
        late = self.is_late()
        self.kill()
        status = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)  # end() reaps it
        sequence = RankSequence(self.rank, self._plan.world_size, end=End.KILLED)
        sequence.problem = problem or (
            f"its run took longer than {self._plan.timeout_s:g} s"
            if late
            else f"its run ended early ({_status_words(status)})"
        )
        return Run(sequence, {}, {}, {}, {})

    # --- in the forked process

    def _play(self, link: connection.Connection, shared: SharedValues) -> None:
        os.setpgid(0, 0)  # so that kill() reaches the processes that the program starts
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self._output.fileno(), 1)
        os.dup2(self._output.fileno(), 2)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked process cannot use a GPU

        def wait(run: Run) -> None:
            _flush()
            _send(link, run)
            shared.update(pickle.loads(link.recv_bytes()))

        run = run_rank(self._plan, self.rank, shared, wait)
        _flush()
        _send(link, run)
        os.killpg(0, signal.SIGKILL)


def _flush() -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have closed it
            file.flush()


def _send(link: connection.Connection, message: Run | SharedValues) -> None:
    link.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _status_words(result: os.waitid_result | None) -> str:
    assert result is not None  # waited for without WNOHANG
    if result.si_code == os.CLD_EXITED:
        return f"exit status {result.si_status}"
    return signal_name(result.si_status)
