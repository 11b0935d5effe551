"""``commlens.preview()``: the trace of one rank of a fake world, in this process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

from commlens.errors import CommandError
from commlens.model.trace import Depth
from commlens.traces.trace import Trace
from commlens.tracing.preview.objects import Key, Learned, Message, Unknown
from commlens.tracing.preview.tensors import run_on_real_tensors
from commlens.tracing.preview.world import FakeWorld
from commlens.tracing.session import LiveTrace


class _EnoughSteps(BaseException):
    """The requested number of optimizer steps has completed."""


class Preview:
    """Runs a program as a rank of a fake world.

    A rank that needs an object from another rank (pipelining's shapes, a broadcast configuration) cannot continue. The program then
    runs as that other rank until it sends the object, and as the first rank again.
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
        """Prepare, with the arguments of :func:`preview`. ``report`` receives a sentence for each additional run."""
        self._program = program
        self._world_size = world_size
        self._ranks_per_node = ranks_per_node
        self._fake_tensors = fake_tensors
        self._depth = depth
        self._steps = steps
        self._report = report or (lambda text: None)
        self._learned: dict[Key, Message | None] = {}
        self._requested: set[Key] = set()
        self.error: BaseException | None = None
        """The exception that ended the program early, SystemExit included."""

    def run(self, rank: int) -> Trace:
        """Return the rank's trace. An exception of the program is kept in ``error``."""
        while True:
            live, unknown = self._attempt(rank)
            if unknown is None:
                return live
            self._learn(unknown)

    def _attempt(self, rank: int) -> tuple[Trace, Key | None]:
        self.error = None
        live = LiveTrace(depth=self._depth, preview=True)
        live.tracer.sees_fake_tensors = self._fake_tensors
        unknown: Key | None = None
        data = live.data
        with self._world(rank) as world:

            def take() -> None:  # while the groups still exist
                nonlocal data
                data = run_on_real_tensors(live.tracer.data)
                data.rank, data.world_size = world.rank, world.world_size
                data.coverage.blind += world.blind

            world.before_destroy = take
            live.start()
            try:
                with _stop_after(self._steps, live):
                    self._program()
            except _EnoughSteps:
                pass
            except Unknown as missing:
                unknown = missing.key
            except BaseException as error:
                self.error = error
            live.stop()
            take()
        return Trace(data), unknown

    def _learn(self, key: Key) -> None:
        """Run the program as the source of ``key`` to learn what it sends, if possible."""
        source, sends = key[1], {"broadcast": "broadcasts", "scatter": "scatters", "send": "sends"}[key[0]]
        self._report(f"The program needs an object that rank {source} {sends}: running it as rank {source} up to that point.")
        self._requested.add(key)
        while key not in self._learned:
            missing: Key | None = None
            with self._world(source, stop_at=key), contextlib.redirect_stdout(io.StringIO()):
                try:
                    self._program()
                except Unknown as unknown:
                    missing = unknown.key
                except Learned:
                    return
                except BaseException as error:
                    self._report(f"Rank {source} ended before that point: {type(error).__name__}: {error}")
            if missing is None or missing in self._requested:
                self._learned.setdefault(missing or key, None)
            else:
                self._learn(missing)

    def _world(self, rank: int, stop_at: Key | None = None) -> FakeWorld:
        return FakeWorld(
            self._world_size,
            rank,
            ranks_per_node=self._ranks_per_node,
            fake_tensors=self._fake_tensors,
            learned=self._learned,
            stop_at=stop_at,
        )


@contextlib.contextmanager
def _stop_after(steps: int | None, live: LiveTrace) -> Any:
    if steps is None:
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        if live.tracer.steps >= steps:
            live.tracer.stop()  # leave out the collectives of finally clauses
            raise _EnoughSteps

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()


def check_world(world_size: int, rank: int) -> None:
    """Check that the rank is in the world."""
    if world_size < 1:
        raise CommandError(f"The world size must be at least 1, not {world_size}.")
    if not 0 <= rank < world_size:
        raise CommandError(f"There is no rank {rank} in a world of size {world_size}: ranks are 0 to {world_size - 1}.")


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
    """Trace one rank of a world of any size, in this process and without a network: ``commlens.preview(main, world_size=1024)``.

    Afterwards the process is as before: no process group, the same environment, no patches.

    Args:
        fn: the program of each rank. It creates its own process group, as in a script, with any backend. It may be called more
            than once if it receives objects from other ranks.
        world_size: number of ranks.
        rank: the rank to preview.
        fake_tensors: use tensors without memory, for models that would not fit. Values that the program reads are invented.
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
    runner = Preview(fn, world_size, ranks_per_node=ranks_per_node, fake_tensors=fake_tensors, depth=depth, steps=steps)
    trace = runner.run(rank)
    error = runner.error
    if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
        raise error
    return trace
