"""Run a program as every rank of a fake world, each in a forked process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

from commlens.check.agreement import common, disagreeing
from commlens.check.branches import Answers
from commlens.check.objects import Need, Shared
from commlens.check.run_rank import Plan, Run, import_modules, run_rank
from commlens.check.sequence import RankSequence
from commlens.model.ranklog import End
from commlens.text import signal_name
from commlens.tracing.preview.objects import Key, Message

_OUTPUT_MAX = 200_000  # bytes of a rank's output that are read
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2
_GRACE_S = 15.0  # for a run to end by itself at its time limit
_RUNS_MAX = 50  # of one rank
_ROUNDS = 3  # of runs until ranks agree on what they have alike
_exit = os._exit  # the program's is replaced


@dataclass
class _Child:
    """A process that plays a rank."""

    rank: int
    pid: int
    reader: int  # the end of a pipe that it writes its run to
    output: IO[bytes]  # of the program
    deadline: float
    received: bytearray = field(default_factory=bytearray)


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
            if None not in self._gathered[rank].values() and not self._gathered_others(rank):
                sequence = ran[rank]
                sequence.guesses = [each for each in sequence.guesses if each.what != "object"]
        return {rank: ran[rank] for rank in wanted}

    def _gathered_others(self, rank: int) -> bool:
        """Check whether a rank gathered other objects than the ranks that were run give."""
        return self._shared.differs(self._gathered[rank], self._sequences)

    def _run_all(self, ranks: Iterable[int]) -> dict[int, RankSequence]:
        sequences: dict[int, RankSequence] = {}
        waiting: dict[int, Need] = {}
        runs: Counter[int] = Counter()
        wanted = set(ranks)
        # The first one shows what to import once for all.
        todo, later = deque(sorted(wanted)[:1]), sorted(wanted)[1:]
        while todo or waiting:
            for run in self._run_each(todo):
                rank = run.sequence.rank
                self._shared.add(run.sent, run.keys)
                self._answers[rank] = run.answers
                self._gathered[rank] = run.gathered
                runs[rank] += 1
                if run.needs is not None and runs[rank] == _RUNS_MAX:
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
        return {rank: sequences[rank] for rank in sorted(wanted)}

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
        """Run some ranks, several at a time."""
        runs: list[Run] = []
        children: dict[int, _Child] = {}
        with selectors.DefaultSelector() as selector, _shared_pages():
            try:
                while todo or children:
                    while todo and len(children) < self._at_once:
                        child = self._start(todo.popleft())
                        children[child.reader] = child
                        selector.register(child.reader, selectors.EVENT_READ)
                    for selected, _ in selector.select(_POLL_S):
                        child = children[selected.fd]
                        chunk = os.read(child.reader, 1 << 20)
                        child.received += chunk
                        if not chunk:
                            selector.unregister(child.reader)
                            runs.append(self._finish(children.pop(selected.fd)))
                    for child in children.values():
                        if time.monotonic() > child.deadline:
                            _kill(child)
            finally:
                for child in children.values():
                    _kill(child)
                    self._finish(child)
        return runs

    def _start(self, rank: int) -> _Child:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _finish
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(reader)
                self._be(rank, writer, output.fileno())
            _exit(1)
        os.close(writer)
        return _Child(rank, pid, reader, output, time.monotonic() + self._plan.timeout_s + _GRACE_S)

    def _be(self, rank: int, writer: int, output: int) -> None:
        """Play a rank in the child."""
        os.setpgid(0, 0)  # its own processes end with it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked process cannot use a GPU
        run = run_rank(self._plan, rank, self._shared)
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(run, pipe, protocol=pickle.HIGHEST_PROTOCOL)
        os.killpg(0, signal.SIGKILL)

    def _finish(self, child: _Child) -> Run:
        """Reap a child whose pipe is closed, and return its run."""
        _kill(child)
        _, status = os.waitpid(child.pid, 0)
        os.close(child.reader)
        with child.output:
            child.output.seek(max(0, child.output.seek(0, os.SEEK_END) - _OUTPUT_MAX))
            text = child.output.read().decode(errors="replace")
        if text:
            self.outputs[child.rank] = text
        with contextlib.suppress(Exception):
            run: Run = pickle.loads(bytes(child.received))
            return run
        sequence = RankSequence(child.rank, self._plan.world_size, end=End.KILLED)
        late = time.monotonic() > child.deadline
        sequence.problem = (
            f"its run took longer than {self._plan.timeout_s:g} s"
            if late
            else f"its run ended early ({_status_words(status)})"
        )
        return Run(sequence, {}, {}, {}, {})


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


def _kill(child: _Child) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)


def _status_words(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return signal_name(-code) if code < 0 else f"exit status {code}"
