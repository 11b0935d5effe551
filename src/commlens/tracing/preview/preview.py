"""``commlens.preview()``: the trace of one rank of a fake world, in this process."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

from commlens.errors import CommandError
from commlens.model.trace import Depth, TraceData
from commlens.traces.trace import Trace
from commlens.tracing.preview.objects import Key, Message, Objects
from commlens.tracing.preview.tensors import run_on_real_tensors
from commlens.tracing.preview.world import FakeWorld
from commlens.tracing.session import LiveTrace

_SENDS = {"broadcast": "broadcasts", "scatter": "scatters", "send": "sends"}


class _EnoughSteps(BaseException):
    """The requested number of optimizer steps has completed."""


class Preview:
    """Runs a program as a rank of a fake world.

    A rank that needs an object from another rank (pipelining's shapes, a broadcast configuration)
    cannot continue. The program then runs as that other rank until it sends the object, and as the
    first rank again. A preview of rank 2 of a pipeline, for example, runs rank 2, which needs
    shapes of rank 1; rank 1, which needs those of rank 0; then ranks 0, 1 and 2.
    """

    def __init__(
        self,
        program: Callable[[], Any],
        world_size: int,
        *,
        ranks_per_node: int = 8,
        fake_tensors: bool = False,
        depth: str | Depth = Depth.COLLECTIVES,
        steps: int | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare, with the arguments of :func:`preview`. ``report`` receives a sentence for each
        additional run.
        """
        self._program = program
        self._world_size = world_size
        self._ranks_per_node = ranks_per_node
        self._fake_tensors = fake_tensors
        self._depth = depth
        self._steps = steps
        self._report = report or (lambda text: None)
        # what other ranks send, found by runs as these ranks; None: they never send it
        self._learned: dict[Key, Message | None] = {}
        self._reasons: dict[Key, str] = {}  # why, for each that is None
        self._requested: set[Key] = set()
        self.error: BaseException | None = None
        """The exception that ended the program early, SystemExit included."""

    def run(self, rank: int) -> Trace:
        """Return the rank's trace. An exception of the program is kept in ``error``, or one that
        says which object is missing.
        """
        while True:
            live, unknown = self._attempt(rank)
            if unknown is None:
                return live
            if unknown in self._reasons:
                self.error = CommandError(self._reasons[unknown])
                return live
            self._learn(unknown)

    def _attempt(self, rank: int) -> tuple[Trace, Key | None]:
        self.error = None
        live = LiveTrace(depth=self._depth, preview=True)
        live.tracer.sees_fake_tensors = self._fake_tensors
        take = functools.partial(run_on_real_tensors, live.tracer.data)

        def stepped() -> None:
            if self._steps is not None and live.tracer.steps >= self._steps:
                live.tracer.stop()  # leave out the collectives of finally clauses
                raise _EnoughSteps

        live.tracer.on_step.append(stepped)
        with self._world(rank) as world:
            world.before_destroy = take  # it notes the groups while they exist
            live.start()
            try:
                self._program()
            except _EnoughSteps:
                pass
            except BaseException as error:
                self.error = error
            live.stop()
            data: TraceData = take()
            data.rank, data.world_size = world.rank, world.world_size
            data.coverage.blind += world.blind
        return Trace(data), world.objects.unknown

    def _learn(self, key: Key) -> None:
        """Run the program as the source of a message until it sends it. Keep the message, or the
        reason why the source never sends it.
        """
        source, sends = key[1], _SENDS[key[0]]
        self._report(
            f"The program needs an object that rank {source} {sends}: running it as rank {source}"
            " up to that point."
        )
        self._requested.add(key)
        objects, error = self._run_until_sent(key)
        while (
            objects.kept is None
            and objects.unknown is not None
            and objects.unknown not in self._requested
        ):
            self._learn(objects.unknown)  # the source itself needs an object of another rank
            objects, error = self._run_until_sent(key)
        self._learned[key] = objects.kept
        if objects.kept is not None:
            return
        reason = "."
        if (missing := objects.unknown) is not None:
            reason = (
                f", because it needs an object from rank {missing[1]} that is not known either."
            )
        elif error is not None:
            reason = f": {type(error).__name__}: {error}"
        self._reasons[key] = (
            f"The program needs an object that rank {source} {sends}; run as rank {source}, it"
            f" ends before that{reason}"
        )

    def _run_until_sent(self, key: Key) -> tuple[Objects, BaseException | None]:
        """Run the program as the source of a message. Return the objects of that run, and the
        exception that ended it.
        """
        with (
            self._world(key[1], stop_at=key) as world,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            try:
                self._program()
            except BaseException as ended:
                return world.objects, ended
        return world.objects, None

    def _world(self, rank: int, stop_at: Key | None = None) -> FakeWorld:
        return FakeWorld(
            self._world_size,
            rank,
            ranks_per_node=self._ranks_per_node,
            fake_tensors=self._fake_tensors,
            learned=self._learned,
            stop_at=stop_at,
        )


def check_world(world_size: int, rank: int) -> None:
    """Check that the rank is in the world."""
    if world_size < 1:
        raise CommandError(f"The world size must be at least 1, not {world_size}.")
    if not 0 <= rank < world_size:
        raise CommandError(
            f"There is no rank {rank} in a world of size {world_size}: ranks are 0 to"
            f" {world_size - 1}."
        )


def preview(
    fn: Callable[[], Any],
    *,
    world_size: int,
    rank: int = 0,
    fake_tensors: bool = False,
    ranks_per_node: int = 8,
    depth: str = "collectives",
    steps: int | None = None,
) -> Trace:
    """Trace one rank of a world of any size, in this process and without a network:
    ``commlens.preview(main, world_size=1024)``.

    Afterwards the process is as before: no process group, the same environment, no patches.

    Args:
        fn: the program of each rank. It creates its own process group, as in a script, with any
            backend. It may be called more than once if it receives objects from other ranks.
        world_size: number of ranks.
        rank: the rank to preview.
        fake_tensors: use tensors without memory, for models that would not fit. Values that the
            program reads are invented.
        ranks_per_node: determines ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``.
        depth: as in :func:`commlens.trace`.
        steps: stop after this many optimizer steps.

    Returns:
        The trace. Its times mean nothing.

    Raises:
        CommandError: a process group already exists, or there is no such rank.
        Exception: any exception of ``fn``.
    """
    check_world(world_size, rank)
    runner = Preview(
        fn,
        world_size,
        ranks_per_node=ranks_per_node,
        fake_tensors=fake_tensors,
        depth=depth,
        steps=steps,
    )
    trace = runner.run(rank)
    error = runner.error
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        raise error
    return trace
