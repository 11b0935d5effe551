"""The line that CUDA prints for each thread of a kernel in which an assertion failed."""

from __future__ import annotations

import re
from typing import Final

ASSERTED: Final = "device-side assert"
"""In the text of the error that follows."""

_LINE: Final = re.compile(
    r"(?P<place>\S{1,400}:\d{1,7}): (?P<kernel>.{1,400}?): block: \[[\d,]{5,40}\], thread:"
    r" \[[\d,]{5,40}\] Assertion `(?P<text>.{1,400})` failed"
)


def parse_device_assertion(text: str) -> str:
    """Return the assertion that failed in a kernel: ``"Indexing.cu:16, vectorized_gather_kernel:
    ind < size"``; empty in any other line.
    """
    found = _LINE.search(text) if " Assertion `" in text else None
    if not found:
        return ""
    return f"{found['place'].rpartition('/')[2]}, {found['kernel']}: {found['text']}"
