"""Run a program as one rank of a fake world, in this process, and return its sequence."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from commlens.check.branches import Answers, Choice
from commlens.check.exchange import CheckExchange
from commlens.check.files import Files, misses_a_file
from commlens.check.notes import stack_of_traceback
from commlens.check.objects import Need, SharedObjects, SharedValues
from commlens.check.recorder import EndOfRun, SequenceRecorder
from commlens.check.sequence import RankSequence
from commlens.check.values import Values
from commlens.model.collective import user_frame
from commlens.model.frames import FrameKind
from commlens.model.ranklog import End
from commlens.tap.running_frames import kind_of_file
from commlens.text import frame_phrase, printable
from commlens.tracing.in_flight.watch import BufferWatch
from commlens.tracing.patches import Patches
from commlens.tracing.preview.objects import Key, Message
from commlens.tracing.preview.world import FakeWorld

_ERROR_MAX = 2000
_SLEEP_MAX_S = 0.001
_TORCH = os.path.dirname(torch.__file__)  # noqa: PTH120
# what of torch answers for GPUs; an error of it comes from so many frames at most
_GPU = tuple(os.path.join(_TORCH, part, "") for part in ("cuda", "accelerator"))  # noqa: PTH118
_NEAR = 4
_OURS = (FrameKind.COMMLENS, FrameKind.PYTHON)
_SHARED = (FrameKind.TORCH, FrameKind.LIBRARY, FrameKind.PYTHON)


class _HardExit(SystemExit):
    """The program called ``os._exit``."""


class Plan(NamedTuple):
    """How to run the program."""

    program: Callable[[], Any]
    world_size: int
    steps: int | None = None
    cpu_s: float | None = None  # end a rank at its next optimizer step after this CPU time
    fake_tensors: bool = False
    ranks_per_node: int = 8
    timeout_s: float = 300.0  # for the run of each rank
    choices: tuple[Choice, ...] = ()  # answers to what the program asks of tensors
    backend: str = ""  # whose rules hold; empty: that of the program
    # read instead of a float whose value a rank alone cannot know; None: the fake world's value
    number: float | None = None


class Run(NamedTuple):
    """The run of a rank up to its end, or up to the point where it waits for another rank."""

    sequence: RankSequence
    sent: dict[Key, Message]  # the objects and small tensors that it gave to other ranks
    keys: dict[str, list[bytes]]  # the keys of the store that it wrote
    answers: Answers  # the values it read that all ranks must have alike
    gathered: dict[Key, Message | None]  # the objects of others that its gathers took
    needs: Need | None = None  # the object or key that it waits for; None: it has ended
    modules: tuple[str, ...] = ()  # the libraries' modules that it imported


def run_rank(plan: Plan, rank: int, shared: SharedValues, wait: Callable[[Run], None]) -> Run:
    """Run the program as ``rank``. The process cannot be reused: call this in one of its own.

    Args:
        plan: the program and its world.
        rank: the rank to play.
        shared: the values that other ranks have shared.
        wait: called with the run so far where the rank needs a value that is not in ``shared``;
            blocks until ``shared`` has the value, or has it among those that no rank gives.
    """
    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    sequence = RankSequence(rank, plan.world_size)
    recorder = SequenceRecorder(sequence, steps=plan.steps, cpu_s=plan.cpu_s, backend=plan.backend)
    world = FakeWorld(
        plan.world_size,
        rank,
        ranks_per_node=plan.ranks_per_node,
        fake_tensors=plan.fake_tensors,
    )
    imported = set(sys.modules)
    exchange = CheckExchange(rank, shared.messages, recorder.notes.guess)
    values = Values(plan.world_size, plan.choices, shared.answers, plan.number, exchange)

    # wait_for, objects and run_so_far refer to one another; none is used before all exist
    def wait_for(need: Need) -> None:
        with _time_stopped():
            wait(run_so_far(need))

    objects = world.objects = SharedObjects(rank, shared, recorder, wait_for)

    def run_so_far(need: Need | None = None) -> Run:
        return Run(
            # of a rank that waits, an empty one: the sequence so far is large to send
            sequence if need is None else RankSequence(rank, plan.world_size),
            objects.sent | exchange.gave,
            objects.keys,
            values.answers,
            objects.gathered | exchange.took,
            needs=need,
            modules=tuple(
                name
                for name, module in list(sys.modules.items())
                if name not in imported
                and kind_of_file(getattr(module, "__file__", None) or "") in _SHARED
            ),
        )

    files = Files()
    buffers = BufferWatch(preview=True, backend=plan.backend)
    with world:
        # these patches stay: nothing but this run happens in the process
        _patch_system()
        files.install(Patches())
        recorder.attach()
        buffers.start()
        values.__enter__()
        try:
            with _time_limit(plan.timeout_s, recorder, sequence):
                plan.program()
        except EndOfRun:
            pass
        except BaseException as error:
            _note_error(sequence, error)
            trace = error.__traceback__  # from the program's first line on
            while trace is not None and kind_of_file(trace.tb_frame.f_code.co_filename) in _OURS:
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace or error.__traceback__)
        buffers.stop()
        recorder.detach()
    sequence.file_lookups = files.lookups
    sequence.hazards = [
        hazard
        for hazard in (*recorder.found_hazards(), *buffers.hazards())
        if hazard.source is not None
    ]
    sequence.decisions = values.decisions
    return run_so_far()


@contextlib.contextmanager
def _time_limit(
    seconds: float, recorder: SequenceRecorder, sequence: RankSequence
) -> Iterator[None]:
    """End the run after this time, with the line at which it stands."""

    def stop(_: int, frame: FrameType | None) -> None:
        source = user_frame(recorder.notes.stack_of_frame(frame))
        where = f" in {frame_phrase(source)}" if source is not None else ""
        sequence.problem = f"its run stood{where} after {seconds:g} s"
        raise EndOfRun

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _time_stopped() -> Iterator[None]:
    """Do not count this time towards the time limit."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


def _patch_system() -> None:
    """Let the program sleep for a moment only, since nobody is waited for here; and let it end by
    ``os._exit`` without its sequence being lost.
    """
    sleep, end, pid = time.sleep, os._exit, os.getpid()

    def sleep_shortly(seconds: Any) -> None:
        sleep(min(float(seconds), _SLEEP_MAX_S))

    def exit_at_once(status: int) -> None:
        if os.getpid() != pid:
            end(status)
        raise _HardExit(status)

    time.sleep = sleep_shortly
    os._exit = exit_at_once  # type: ignore[assignment]


def _note_error(sequence: RankSequence, error: BaseException) -> None:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        if code == 0:
            return
        sequence.exit_code = code
    else:
        sequence.exit_code = 1
    sequence.end = End.FAILED
    first = printable(next(iter(str(error).splitlines()), ""))
    name = "SystemExit" if isinstance(error, SystemExit) else type(error).__name__
    sequence.exception = f"{name}: {first}"[:_ERROR_MAX] if first else name
    sequence.exception_stack = stack_of_traceback(error.__traceback__)
    if misses_a_file(error):
        sequence.misses = "file"
    elif "cuda" in str(error).lower() or any(
        frame.file.startswith(_GPU) for frame in sequence.exception_stack[:_NEAR]
    ):
        sequence.misses = "gpu"


def warm_up() -> None:
    """Import what all ranks need, once, before the processes are forked."""
    with FakeWorld(1, 0):
        pass


def import_modules(names: tuple[str, ...]) -> None:
    """Import the modules that one rank imported, so that the other ranks' processes share them."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
