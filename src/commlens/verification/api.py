"""``commlens.verify()``: verify the collectives of one region of a program. Imports torch only when it is called."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

from commlens.errors import MissingDependency

__all__ = ["verify"]


@contextlib.contextmanager
def verify() -> Iterator[None]:
    """Verify every collective inside, whatever the setting outside; on leaving, all is as it was.

    ``with commlens.verify(): ...``, or ``@commlens.verify()`` on a function. All ranks must enter it at the same point of the program: they
    wait there for each other, for up to 10 s. A rank that does not come is named in one line of the log, and what is issued
    inside is compared among the ranks that are inside. Where nothing is recorded yet, recording begins, and goes on.

    Raises:
        DistributedOperationException: inside, at a collective that would go wrong.
        MissingDependency: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency.torch("commlens.verify()")
    from commlens.capture import session

    session.start_if_stopped()
    session.enter_verification()
    try:
        yield
    finally:
        session.leave_verification()
