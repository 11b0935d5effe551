"""Read Flight Recorder JSON. A truncated file yields everything before the cut."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Final

import msgspec

from commlens.errors import FormatError

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_ENTRIES_MAX: Final = 1_000_000


def read_json(data: bytes) -> tuple[Any, bool]:
    """Return the data and whether it is truncated.

    Raises:
        FormatError: the data is not JSON. The message is a sentence about "It".
    """
    data = data[3:] if data[:3] == codecs.BOM_UTF8 else data  # as editors on Windows add it
    try:
        return msgspec.json.decode(data), False
    except (ValueError, RecursionError) as error:
        found = _salvage(data)
        if found:
            return found, True
        raise FormatError(f"It is not JSON: {str(error).rstrip('.')}.") from None


def _salvage(data: bytes) -> dict[str, Any]:
    """Return the complete members of an object, and the complete items of its "entries"."""
    text = data.decode("utf-8", "replace").rstrip("\ufffd")
    decode = json.JSONDecoder().raw_decode
    found: dict[str, Any] = {}
    try:
        at = _skip_sign(text, 0, "{")
        while True:
            key, at = decode(text, _skip_space(text, at))
            at = _skip_sign(text, at, ":")
            if key == "entries" and text[at : at + 1] == "[":
                items: list[Any] = []
                found[key] = items
                at = _skip_space(text, at + 1)
                while text[at] != "]" and len(items) < _ENTRIES_MAX:
                    item, at = decode(text, at)
                    items.append(item)
                    at = _skip_space(text, at)
                    at = _skip_sign(text, at, ",") if text[at] != "]" else at
                at += 1
            else:
                found[key], at = decode(text, at)
            at = _skip_sign(text, at, ",")
    except (ValueError, IndexError, TypeError, RecursionError):
        return found


def _skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr] # it matches nothing, too


def _skip_sign(text: str, at: int, sign: str) -> int:
    """Return the position after a sign and the spaces around it."""
    at = _skip_space(text, at)
    if text[at] != sign:
        raise ValueError
    return _skip_space(text, at + 1)
