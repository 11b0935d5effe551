"""numpy without the threads of its linear algebra, of which nothing here makes use: a process with threads may not be forked safely."""

from __future__ import annotations

import os
import sys
from typing import Final

_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def import_numpy_alone() -> None:
    """Import numpy so that this process still has one thread, and reading many dumps can be spread over all processors."""
    if "numpy" in sys.modules:
        return
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, "1"))
    try:
        import numpy  # noqa: F401
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
