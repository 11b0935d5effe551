"""The answer to ``commlens attach --inject``, which asks to start recording in a running job."""

from __future__ import annotations

from commlens.errors import CommandError
from commlens.outside.find_ranks import FoundJob


def inject(job: FoundJob) -> str:
    """Refuse: the ranks would start to count their collectives at different moments, and a verdict compares the counts.

    Raises:
        CommandError: always.
    """
    raise CommandError(
        f"Recording cannot be started in {job.label}: the ranks would begin to number their collectives at different moments, so verdicts "
        "could be wrong. `commlens attach` without --inject looks at them from outside."
    )
