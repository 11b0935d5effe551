"""Reads Flight Recorder JSON. Of a file that ends too early, what came before the end is kept."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from commlens.errors import FormatError

__all__ = ["read_json"]

_SPACE: Final = " \t\r\n"


def read_json(data: bytes) -> tuple[Any, bool]:
    """The data, and whether its end is missing.

    Raises:
        FormatError: it is not JSON. The message is a sentence about "It".
    """
    try:
        return msgspec.json.decode(data), False
    except (ValueError, RecursionError) as error:
        found = _salvage(data)
        if found:
            return found, True
        raise FormatError(f"It is not JSON: {str(error).rstrip('.')}.") from None


def _salvage(data: bytes) -> dict[str, Any]:
    """The members of an object that are whole; of "entries", the items that are whole."""
    text = data.decode("utf-8", "replace").rstrip("\ufffd")
    decode = json.JSONDecoder().raw_decode
    found: dict[str, Any] = {}
    try:
        at = _after(text, 0, "{")
        while True:
            key, at = decode(text, _space(text, at))
            at = _after(text, at, ":")
            if key == "entries" and text[at : at + 1] == "[":
                found[key] = items = []
                at = _space(text, at + 1)
                while text[at] != "]":
                    item, at = decode(text, at)
                    items.append(item)
                    at = _space(text, at)
                    at = _after(text, at, ",") if text[at] != "]" else at
                at += 1
            else:
                found[key], at = decode(text, at)
            at = _after(text, at, ",")
    except (ValueError, IndexError, TypeError, RecursionError):
        return found


def _space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _after(text: str, at: int, sign: str) -> int:
    """The place of what follows a sign."""
    at = _space(text, at)
    if text[at] != sign:
        raise ValueError
    return _space(text, at + 1)
