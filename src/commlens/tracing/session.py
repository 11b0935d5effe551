"""``with commlens.trace() as trace:``: trace a block of code."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from commlens.errors import CommandError
from commlens.model.steps import ALL, parse_steps
from commlens.model.trace import Depth, TraceData
from commlens.traces.trace import Trace
from commlens.tracing.tracer import Tracer

if TYPE_CHECKING:
    from typing_extensions import Self


class LiveTrace(Trace):
    """A running trace: a context manager that is a :class:`commlens.Trace` of everything traced so
    far.

    Entering it again continues the trace. Several may be open at once.
    """

    def __init__(
        self,
        *,
        depth: str | Depth = Depth.COLLECTIVES,
        steps: str | range | tuple[int, int | None] | None = None,
        whole_steps: int | None = None,
        preview: bool = False,
    ) -> None:
        self.tracer = Tracer(
            Depth(depth),
            steps=_range_of(steps),
            whole_steps=whole_steps,
            preview=preview,
            # In a real run it slows the ops down, and so changes the times of the trace.
            watches_buffers=preview or Depth(depth) is Depth.OPS,
        )
        self._open = 0
        self._finished: TraceData | None = None
        super().__init__(TraceData())

    @property
    def data(self) -> TraceData:
        """The trace so far."""
        if self._finished is not None:
            return self._finished
        data = self.tracer.data()
        if not self._open:
            self._finished = data
        return data

    def __reduce__(self) -> tuple[type[Trace], tuple[TraceData]]:
        """Copy and pickle as the trace so far."""
        return Trace, (self.data,)

    def start(self) -> None:
        """Start tracing, as ``with`` does."""
        self._open += 1
        if self._open == 1:
            self._finished = None
            self.tracer.start()

    def stop(self) -> None:
        """Stop tracing; the trace remains readable."""
        self._open -= 1
        if self._open == 0:
            self.tracer.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _range_of(steps: str | range | tuple[int, int | None] | None) -> range:
    """Return the wanted steps: all for None, and a pair as a slice."""
    if steps is None:
        return ALL
    if isinstance(steps, tuple):
        first, end = steps
        return range(first, ALL.stop if end is None else end)
    if isinstance(steps, range):
        if steps.step == 1:
            return steps
    else:
        with contextlib.suppress(ValueError):
            return parse_steps(steps)
    raise CommandError(
        f"{steps!r} is not a range of steps: give FIRST:LAST counted from 0, for example 2:4 for"
        " steps 2 and 3."
    )
