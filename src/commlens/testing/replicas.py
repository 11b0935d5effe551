"""An assertion for tests on several ranks: replicas hold the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def assert_replicas_agree(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: torch.distributed.ProcessGroup | None = None,
    tolerance: float = 0.0,
    timeout_s: float = 60.0,
) -> None:
    """Assert on all ranks that they have what they must have alike: parameters, buffers, gradients
    and optimizer states. All ranks call it, for example in a function that ``run_on_ranks`` runs.
    The arguments are those of :func:`commlens.check_numbers`.

    Raises:
        AssertionError: ranks differ, or one did not come; with the verdict.
        CommandError: as :func:`commlens.check_numbers`.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    from commlens.numbers.checks import check_numbers

    verdict = check_numbers(model, optimizer, group=group, tolerance=tolerance, timeout_s=timeout_s)
    if verdict.kind != "healthy" or verdict.missing_evidence:
        raise AssertionError(str(verdict))
