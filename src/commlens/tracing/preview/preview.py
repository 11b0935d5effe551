"""``commlens.preview()``: the trace of one rank of a world that does not exist, in this process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

from commlens.errors import CommandError
from commlens.model.trace import Depth
from commlens.traces.trace import Trace
from commlens.tracing.preview.objects import Key, Learned, Message, Unknown
from commlens.tracing.preview.world import FakeWorld
from commlens.tracing.session import LiveTrace


class _EnoughSteps(BaseException):
    """As many optimizer steps as were asked for."""


class Preview:
    """Runs a program as ranks of a fake world until one of them has run to its end.

    A rank that needs an object of another's (pipelining's shapes, a broadcast configuration) cannot go on: the program is run
    as that other rank up to where it sends it, and then as the first one again.
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
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            program: what every rank runs.
            world_size: number of ranks.
            ranks_per_node: how many share a node.
            fake_tensors: run on tensors without memory.
            depth: as in ``commlens.trace``.
            steps: stop after so many optimizer steps.
            say: told, in words, when the program is run once more.
        """
        self._program = program
        self._world_size = world_size
        self._ranks_per_node = ranks_per_node
        self._fake_tensors = fake_tensors
        self._depth = depth
        self._steps = steps
        self._say = say or (lambda text: None)
        self._known: dict[Key, Message | None] = {}
        self._pursued: set[Key] = set()
        self.error: BaseException | None = None
        """What ended the program early: its own exception, or SystemExit."""

    def run(self, rank: int) -> Trace:
        """The trace of this rank. What the program raised is in ``error``."""
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
        with self._world(rank) as world:
            kept = _Kept(live, world)
            world.before_destroy = kept.take
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
            kept.take()
        return Trace(kept.data), unknown

    def _learn(self, key: Key) -> None:
        """Find out what ``key``'s source sends, if it can be."""
        source, what = key[1], {"broadcast": "broadcasts", "scatter": "scatters", "send": "sends"}[key[0]]
        self._say(f"An object is needed that rank {source} {what}: running the program as rank {source} up to there.")
        self._pursued.add(key)
        while key not in self._known:
            missing: Key | None = None
            with self._world(source, until=key), contextlib.redirect_stdout(io.StringIO()):
                try:
                    self._program()
                except Unknown as unknown:
                    missing = unknown.key
                except Learned:
                    return
                except BaseException as error:
                    self._say(f"Rank {source} ended before that: {type(error).__name__}: {error}")
            if missing is None or missing in self._pursued:
                self._known.setdefault(missing or key, None)
            else:
                self._learn(missing)

    def _world(self, rank: int, until: Key | None = None) -> FakeWorld:
        return FakeWorld(
            self._world_size, rank, ranks_per_node=self._ranks_per_node, fake_tensors=self._fake_tensors, known=self._known, until=until
        )


class _Kept:
    """The trace's data, taken while the groups are still there."""

    def __init__(self, live: LiveTrace, world: FakeWorld) -> None:
        self._live = live
        self._world = world
        self.data = live.data

    def take(self) -> None:
        """Take it now."""
        from commlens.tracing.preview.tensors import really

        self.data = really(self._live.tracer.data)()
        self.data.rank, self.data.world_size = self._world.rank, self._world.world_size
        self.data.coverage.blind += self._world.blind


@contextlib.contextmanager
def _stop_after(steps: int | None, live: LiveTrace) -> Any:
    if steps is None:
        yield
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        if live.tracer.steps >= steps:
            live.tracer.stop()  # what a finally clause still issues is no part of it
            raise _EnoughSteps

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()


def check_world(world_size: int, rank: int) -> None:
    """Refuse a rank outside of the world.

    Raises:
        CommandError: it is.
    """
    if world_size < 1:
        raise CommandError(f"A world has at least one rank; {world_size} were asked for.")
    if not 0 <= rank < world_size:
        raise CommandError(f"There is no rank {rank} in a world of {world_size}: ranks go from 0 to {world_size - 1}.")


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
    """The trace of one rank of a world of any size, in this process and without a network: ``commlens.preview(main, world_size=1024)``.

    The process is left as it was: no process group, the same environment, nothing patched.

    Args:
        fn: what each rank would run. It makes its own process group, as in a script; any backend will do. It may be called more
            than once, where it receives objects from other ranks.
        world_size: number of ranks.
        rank: the rank to be.
        fake_tensors: run on tensors without memory: for models that would not fit. Values that the program asks for are made up.
        ranks_per_node: what ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` follow from.
        depth: as in :func:`commlens.trace`.
        steps: stop after so many optimizer steps.

    Returns:
        The trace. Times in it mean nothing.

    Raises:
        CommandError: a process group exists already, or there is no such rank.
        Exception: whatever ``fn`` raises.
    """
    check_world(world_size, rank)
    runner = Preview(fn, world_size, ranks_per_node=ranks_per_node, fake_tensors=fake_tensors, depth=depth, steps=steps)
    trace = runner.run(rank)
    if runner.error is not None and not _is_clean_exit(runner.error):
        raise runner.error
    return trace


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)
