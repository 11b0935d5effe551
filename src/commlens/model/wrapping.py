"""Wrap sentences, so that no line ends between a number and its unit."""

from __future__ import annotations

import re
import textwrap
from typing import Final

_BEFORE_UNIT: Final = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|B|[kMGTP]B)\b)")
_NO_BREAK: Final = "\ue000"  # in place of a blank: rich wraps lines at no-break spaces, too


def unbroken(text: str) -> str:
    """Return a text that wraps at no blank between a number and its unit. Pass the wrapped text to
    :func:`rejoined`.
    """
    return _BEFORE_UNIT.sub(_NO_BREAK, text)


def rejoined(text: str) -> str:
    """Return a wrapped text with all its blanks."""
    return text.replace(_NO_BREAK, " ")


def fill(text: str, width: int, *, first: str = "", indent: str = "") -> str:
    """Wrap a text: ``first`` begins its first line, ``indent`` its further ones. Paths are not
    broken.
    """
    lines = textwrap.wrap(
        unbroken(text),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return rejoined("\n".join(lines))
