"""The exception in the form that the program expects."""

from __future__ import annotations

import functools
import sys
from typing import Any

from commlens.errors import DistributedOperationException


def refusal(text: str, kind: str) -> DistributedOperationException:
    """A :class:`commlens.DistributedOperationException`, which Accelerate's own handlers catch where accelerate is loaded."""
    operations = sys.modules.get("accelerate.utils.operations")
    theirs = getattr(operations, "DistributedOperationException", None)
    error = _joint(theirs)(text) if isinstance(theirs, type) else DistributedOperationException(text)
    error.kind = kind
    return error


@functools.lru_cache(maxsize=2)
def _joint(theirs: type[Exception]) -> type[DistributedOperationException]:
    joint: Any = type("DistributedOperationException", (DistributedOperationException, theirs), {"__module__": "commlens"})
    result: type[DistributedOperationException] = joint
    return result
