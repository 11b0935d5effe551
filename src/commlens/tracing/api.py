"""``commlens.trace()``, which imports torch only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from commlens.errors import require_torch

if TYPE_CHECKING:
    from commlens.tracing.session import LiveTrace


def trace(
    *,
    depth: Literal["collectives", "ops"] = "collectives",
    steps: str | range | tuple[int, int | None] | None = None,
    whole_steps: int | None = None,
) -> LiveTrace:
    """Trace the collectives of a block of code: ``with commlens.trace() as trace: ...``, then
    ``trace.summary()``.

    Args:
        depth: ``"collectives"`` costs almost nothing and leaves torch.compile alone; ``"ops"`` also
            records tensor ops, with a dispatch mode.
        steps: trace only these optimizer steps, counted from 0: ``"2:4"``, ``range(2, 4)``. None
            traces all.
        whole_steps: the number of steps kept event by event (default 10). Later steps are
            summarised to bound memory.

    Returns:
        A context manager that is also a :class:`commlens.Trace`, readable during and after the
        block.

    Raises:
        MissingDependency: torch is not installed.
        CommandError: ``steps`` is not a range of steps.
    """
    require_torch("commlens.trace()")
    from commlens.tracing.session import LiveTrace

    return LiveTrace(depth=depth, steps=steps, whole_steps=whole_steps)
