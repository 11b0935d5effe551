"""torchelastic's error file: torchrun shows its message in the summary of failures. Each worker's
TORCHELASTIC_ERROR_FILE names one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path


def write(
    environ: Mapping[str, str], text: str, *, overwrite: bool = False, earliest: bool = True
) -> None:
    """Write a message into the error file of the process with this environment, if it has one.
    Errors are ignored.

    With ``earliest``, torchrun shows it as the root cause. Without ``overwrite``, what the program
    itself has written stays: it says more.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not text:
        return
    # torchrun shows the earliest error as the root cause, and counts in seconds
    before = int(time.time()) - (1 if earliest else 0)
    content = {
        "message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(before)}}
    }
    with (
        contextlib.suppress(OSError),
        Path(path).open("w" if overwrite else "x", encoding="utf-8") as file,
    ):
        json.dump(content, file)
