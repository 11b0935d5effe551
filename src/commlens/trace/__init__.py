"""Which collectives a model issues, when, why, and how many bytes. Imports torch when it is used."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Literal

from commlens.errors import MissingDependency

if TYPE_CHECKING:
    from commlens.trace.session import LiveTrace

__all__ = ["trace"]


def trace(
    *,
    depth: Literal["collectives", "ops"] = "collectives",
    steps: str | range | tuple[int, int | None] | None = None,
    whole_steps: int | None = None,
) -> LiveTrace:
    """Trace the collectives of a block of code: ``with commlens.trace() as trace: ...``, then ``trace.summary()``.

    Args:
        depth: ``"collectives"`` costs next to nothing and leaves torch.compile alone; ``"ops"`` lists tensor ops, too, with a
            dispatch mode.
        steps: trace only these optimizer steps, counted from 0: ``"2:4"``, ``range(2, 4)``. None traces all.
        whole_steps: so many steps are kept event by event, later ones are summarised (10 unless given), so that memory is bounded.

    Returns:
        A context manager that is a :class:`commlens.Trace` of what it saw, during the block and after it.

    Raises:
        MissingDependency: torch is not installed.
        CommandError: ``steps`` is not a range of steps.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency.torch("commlens.trace()")
    from commlens.trace.session import LiveTrace

    return LiveTrace(depth=depth, steps=steps, whole_steps=whole_steps)


class _CallablePackage(types.ModuleType):
    """``commlens.trace()`` is a public function, and Python puts this package under the same name: so the package answers the call."""

    def __call__(
        self,
        *,
        depth: Literal["collectives", "ops"] = "collectives",
        steps: str | range | tuple[int, int | None] | None = None,
        whole_steps: int | None = None,
    ) -> LiveTrace:
        """See :func:`trace`."""
        return trace(depth=depth, steps=steps, whole_steps=whole_steps)


sys.modules[__name__].__class__ = _CallablePackage
