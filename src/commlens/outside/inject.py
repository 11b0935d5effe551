"""Start recording in a running job. Only on request: it runs code in the ranks."""

from __future__ import annotations

from commlens.errors import CommandError
from commlens.outside.find_ranks import FoundJob


def inject(job: FoundJob) -> str:
    """Refuse, as no way is there to run code in these ranks.

    Raises:
        CommandError: always.
    """
    raise CommandError(
        f"Recording cannot be started in {job.label}: that needs Python 3.14's sys.remote_exec in the ranks. "
        "`commlens attach` without --inject looks at them from outside."
    )
