"""The three answers of a comparison: agree, disagree, unknown."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

Aspect = Literal["op", "shape", "dtype", "reduce-op", "root", "splits", "p2p", "device", "layout"]
"""The aspect that ranks disagree in: the second half of a verdict's ``mismatch/...``."""


class Severity(str, Enum):
    """How bad a disagreement is."""

    ILLEGAL = "illegal"  # the backend will hang, crash or corrupt
    SUSPICIOUS = "suspicious"  # it runs, but is probably not intended


class Agree(msgspec.Struct, frozen=True):
    """Everything that was compared agrees."""


class Unknown(msgspec.Struct, frozen=True):
    """Nothing disagrees, but some aspects could not be compared."""

    aspects: tuple[str, ...]


class Party(msgspec.Struct, frozen=True):
    """Ranks whose collectives agree."""

    ranks: tuple[int, ...]
    phrase: str  # "float32[1048576]", "sends float32[4]"


class Disagree(msgspec.Struct, frozen=True):
    """Ranks met in one collective with different arguments."""

    aspect: Aspect
    severity: Severity
    minority: tuple[int, ...]  # the ranks that deviate; empty on a tie
    parties: tuple[Party, ...]  # the largest first
    detail: str  # "rank 1: float32[4]; ranks 0,2-3: float32[5]"
    # the arguments of the minority are wrong whatever the others pass; it may be most ranks
    in_itself: bool = False

    @property
    def tie(self) -> bool:
        """Whether no party has the majority, so that no rank can be called the odd one."""
        return not self.minority


Answer = Agree | Unknown | Disagree
