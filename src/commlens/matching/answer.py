"""The three answers of a comparison: agree, disagree, unknown."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

Aspect = Literal["op", "shape", "dtype", "reduce-op", "root", "splits", "p2p", "device", "layout"]
"""In what ranks disagree: the second half of the verdict's ``mismatch/...``."""


class Severity(str, Enum):
    """How bad a disagreement is."""

    ILLEGAL = "illegal"  # the backend will hang, crash or corrupt
    SUSPICIOUS = "suspicious"  # it runs, and is probably not meant


class Agree(msgspec.Struct, frozen=True):
    """All that was compared is equal, or corresponds."""


class Unknown(msgspec.Struct, frozen=True):
    """Nothing disagrees, but not everything could be compared."""

    aspects: tuple[str, ...]


class Party(msgspec.Struct, frozen=True):
    """Ranks that asked for the same thing."""

    ranks: tuple[int, ...]
    what: str  # "float32[1048576]"


class Disagree(msgspec.Struct, frozen=True):
    """Ranks met, but not for the same thing."""

    aspect: Aspect
    severity: Severity
    minority: tuple[int, ...]  # the odd ones out; empty on a tie
    parties: tuple[Party, ...]  # the largest first
    detail: str  # in words: who asked for what

    @property
    def tie(self) -> bool:
        """Whether no side has a majority, so that nobody can be called the odd one."""
        return not self.minority


Answer = Agree | Unknown | Disagree
